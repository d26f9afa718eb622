"""A small update with everything in it: ragged chunks, several trajectories, ratios on both sides of the clip."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.aggregate import token_weights
from vlarl.algorithms.base import Loss
from vlarl.config.schema import Config
from vlarl.decisions import TrainBatch
from vlarl.policies.base import Evaluation
from vlarl.policies.distribution import token_logprobs
from vlarl.policies.openvla.actions import UniformActionCodec
from vlarl.policies.openvla.decisions import token_decisions, token_ids
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy, TokenScores

TEMPERATURE = 1.6
STEPS, DIM, BINS = 3, 2, 5
TOKENS = STEPS * DIM
EXECUTED = torch.tensor([3, 2, 1, 3])
TRAJECTORY = torch.tensor([0, 0, 1, 2])
ROWS = len(EXECUTED)


NOTHING = torch.zeros(ROWS, 1, dtype=torch.int64)
INPUTS = OpenVLAInputs(NOTHING, NOTHING.bool(), NOTHING, None)


class Actor(SimpleNamespace):
    """An OpenVLA policy without a model: it evaluates the logits that it is given. Ids are bin indices."""

    device = torch.device("cpu")
    action_dim = DIM
    codec = UniformActionCodec(vocab_size=BINS, num_bins=BINS, action_dim=DIM)
    _bin_values: torch.Tensor | None = None
    bin_values = OpenVLAPolicy.bin_values
    evaluate = OpenVLAPolicy.evaluate

    logits: torch.Tensor
    values: torch.Tensor | None

    def score(self, inputs: OpenVLAInputs, ids: torch.Tensor, *, critic_only: bool) -> TokenScores:
        return TokenScores(self.logits, self.values)


def make(
    aggregate: str = "token_mean", num_values: int = 1, by_trajectory: bool = False
) -> tuple[torch.Tensor, TrainBatch]:
    """Logits and their batch in double precision; `by_trajectory` gives all tokens of one the same advantage."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(ROWS, TOKENS, BINS)
    indices = torch.randint(BINS, (ROWS, TOKENS), generator=generator)
    logprobs = token_logprobs(logits, indices, TEMPERATURE).double()
    mask = torch.arange(TOKENS)[None] < EXECUTED[:, None] * DIM
    advantages = (
        normal(3)[TRAJECTORY][:, None].expand(-1, TOKENS).contiguous() if by_trajectory else normal(ROWS, TOKENS)
    )
    value_mask = {1: torch.ones(ROWS, 1), STEPS: mask[:, ::DIM], TOKENS: mask}[num_values].bool()
    decisions = token_decisions(indices, logprobs.float(), DIM).executed(EXECUTED)
    assert torch.equal(decisions.mask, mask)
    return logits, TrainBatch(
        inputs=INPUTS,
        decisions=decisions,
        old_logprobs=logprobs + 0.3 * normal(ROWS, TOKENS),
        advantages=advantages,
        trajectory=TRAJECTORY,
        returns=normal(ROWS, num_values),
        old_values=normal(ROWS, num_values),
        value_mask=value_mask,
        weights=token_weights(mask, TRAJECTORY, aggregate),
        ref_logprobs=logprobs + 0.2 * normal(ROWS, TOKENS),
    )


def values_of(batch: TrainBatch) -> torch.Tensor:
    """What the critic says now."""
    assert batch.old_values is not None
    return batch.old_values + 0.3 * torch.sin(torch.arange(batch.old_values.numel())).reshape(batch.old_values.shape)


def logprobs_of(logits: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """[N, L] the log-probs of the batch's tokens under these logits."""
    return token_logprobs(logits, token_ids(batch.decisions), TEMPERATURE)


def with_sequence_ratio(logits: torch.Tensor, batch: TrainBatch) -> TrainBatch:
    """The batch with the mean log-ratio of each row's trajectory under these logits, as the learner fills it in."""
    gap = (logprobs_of(logits.detach(), batch) - batch.old_logprobs).masked_fill(~batch.mask, 0)
    same = (batch.trajectory[:, None] == batch.trajectory[None, :]).double()
    return replace(batch, sequence_log_ratio=(same @ gap.sum(dim=1).double()) / (same @ batch.mask.sum(dim=1).double()))


def evaluate(config: Config, logits: torch.Tensor, batch: TrainBatch, values: torch.Tensor | None) -> Evaluation:
    """What the policy says of a microbatch when the learner wants its gradient."""
    options = config.algorithm
    return Actor(logits=logits, values=values).evaluate(
        batch.inputs,
        batch.decisions,
        TEMPERATURE,
        entropy_gradient=options.entropy_coef > 0,
        extras=("action_reconstruction",) if options.action_reconstruction_coef > 0 else (),
    )


def compute(
    config: Config,
    logits: torch.Tensor,
    batch: TrainBatch,
    values: torch.Tensor | None = None,
    *,
    kl_coef: float = 0.0,
    train_policy: bool = True,
    num_values: int | None = None,
) -> Loss:
    """The loss of a microbatch of the problem; `num_values` executed values are in the whole minibatch."""
    algorithm = build_algorithm(config.algorithm, TEMPERATURE, config.kl)
    assert batch.value_mask is not None
    count = int(batch.value_mask.sum()) if num_values is None else num_values
    evaluation = evaluate(config, logits, batch, values)
    return algorithm.loss(evaluation, batch, value_weight=1 / count, kl_coef=kl_coef, train_policy=train_policy)
