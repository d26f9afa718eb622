"""The learner with texts: packed or padded, by rows or by tokens, the update is the same; and experts are balanced."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from fakes.decisions import annotated_update
from fakes.float_error import CEILING, EPS, check_gradients, in_float64
from fakes.vlm_models import MIXTURES, observation, write_model

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config
from vlarl.decisions import Sampling, TrainBatch
from vlarl.errors import UsageError
from vlarl.policies.tiny import init_tiny
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.training.learner import Learner

ROWS = 10
SAMPLING = Sampling(1.0, max_tokens=9, stop=tuple(range(60)))
PPO = {"name": "ppo", "gae_level": "token", "critic_hidden": (16,)}


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VlmPolicy]:
    root = tmp_path_factory.mktemp("texts")

    def policy(kind: str) -> VlmPolicy:
        folder = root / kind if (root / kind).is_dir() else write_model(kind, root / kind)
        return read_policy(folder)

    return policy


def batch_of(policy: VlmPolicy, needs_critic: bool = False) -> TrainBatch:
    """Texts of the policy's own for prompts of very different lengths, with random advantages."""
    images = (0, 1) if policy.processor.reads_images else (0,)
    prompts = [observation("how many? " * (1 + i % 5), images[i % len(images)], i) for i in range(ROWS)]
    inputs = policy.process(prompts)
    decisions = policy.sample(inputs, policy.noise(range(ROWS), SAMPLING), SAMPLING)
    generator = torch.Generator().manual_seed(0)
    advantages, returns, values = (torch.randn(decisions.mask.shape, generator=generator) for _ in range(3))
    batch = TrainBatch(inputs, decisions, torch.arange(ROWS), advantages=advantages)
    if not needs_critic:
        return batch
    return replace(batch, returns=returns, old_values=values, value_mask=decisions.mask)


def learner_of(policy: VlmPolicy, **sections) -> Learner:
    config = Config.model_validate(sections)
    return Learner(policy, build_algorithm(config.algorithm, 1.0, config.kl), config, torch.device("cpu"))


CUTS = {
    "packed": {"packing": True, "microbatch_size": 4},
    "tokens": {"microbatch_tokens": 300},
    "tokens, sorted": {"microbatch_tokens": 300, "sort_by_length": True},
    "tokens, packed": {"microbatch_tokens": 300, "packing": True},
    "one by one": {"microbatch_tokens": 1, "packing": True},
}


@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, PPO], ids=["grpo", "ppo"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_does_not_depend_on_how_rows_are_put_together(policy_of, cut, algorithm):
    policy, needs_critic = policy_of("qwen2"), algorithm is PPO
    batch = batch_of(policy, needs_critic)
    rows = torch.tensor([3, 1, 5, 4, 9, 2, 0, 8, 7])
    strayed = 0.02 * torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, old_logprobs=batch.decisions.engine_logprobs - strayed)

    def gradients(optim, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        learner = learner_of(copy.deepcopy(policy), algorithm=algorithm | {"entropy_coef": 0.1}, optim=optim)
        learner.policy.to(dtype)
        with in_float64() if dtype == torch.float64 else nullcontext():
            learner._accumulate(learner._minibatch(batch, rows, moved=True), rows, True, False)
        return {name: p.grad for name, p, _ in learner.named_trained() if p.grad is not None}

    whole = {"microbatch_size": 100}
    check_gradients(gradients(CUTS[cut]), gradients(whole, torch.float64), gradients(whole))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_first_ratio_is_exactly_one(policy_of, cut, kind):
    """Annotations and updates take the same passes, with and without gradients."""
    policy = policy_of(kind)
    batch = batch_of(policy, needs_critic=True)
    optim = CUTS[cut] | {"lr": 1e-3, "minibatches": 2}
    result = annotated_update(learner_of(policy, algorithm=PPO | {"epochs": 2}, optim=optim), batch, 1)
    assert result.metrics["ratio_first_minibatch_error"] == 0.0
    assert result.metrics["ratio_max"] > 1 + 1e-4, "later ones have moved"


def test_the_fraction_of_tokens_that_is_not_padding_is_a_metric(policy_of):
    def efficiency(**optim) -> float:
        policy = policy_of("qwen2")
        return annotated_update(learner_of(policy, optim=optim), batch_of(policy), 1).metrics["packing_efficiency"]

    policy = policy_of("qwen2")
    batch = batch_of(policy)
    read = int(batch.inputs.lengths.sum() + (batch.decisions.sample.length - 1).sum())
    longest = int(batch.inputs.lengths.max() + batch.decisions.sample.length.max() - 1)
    assert efficiency(packing=True) == 1.0
    assert efficiency() == pytest.approx(read / (ROWS * longest), rel=1e-12)
    assert efficiency() < efficiency(microbatch_size=2, sort_by_length=True) < 1
    assert efficiency(microbatch_size=1) == 1.0


def test_values_of_last_observations_come_in_their_order(policy_of):
    policy = policy_of("qwen2")
    batch = batch_of(policy, needs_critic=True)
    last = batch.inputs.rows(torch.tensor([4, 0, 3, 1, 2]))  # of five lengths
    plain = learner_of(copy.deepcopy(policy), algorithm=PPO).annotate(batch, 1, last).last_values
    optim = {"microbatch_tokens": 200, "packing": True, "sort_by_length": True}
    found = learner_of(policy, algorithm=PPO, optim=optim).annotate(batch, 1, last).last_values
    assert (found - plain).abs().max() < 0.1 * torch.pdist(plain).min(), "rows were mixed up"


def test_a_separate_critic_packs_too(policy_of):
    policy = policy_of("qwen3")
    sections = {"algorithm": PPO, "critic": {"kind": "separate"}, "optim": {"packing": True}}
    learner = learner_of(policy, **sections)
    assert learner.critic is not policy and learner.critic.packing and policy.packing
    assert learner.critic.access.model is learner.critic.model


def collapse(policy: VlmPolicy) -> None:
    """Let every router send every token to experts 0 and 1: by a feature that all tokens have, and no layer changes."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[:, 0] = 20.0
        for name, weight in policy.model.named_parameters():
            weight.requires_grad_(name.endswith("gate.weight"))
            if name.endswith("o_proj.weight"):
                weight[0] = 0.0
            elif name.endswith("down_proj"):  # [experts, hidden, …]
                weight[:, 0] = 0.0
            elif name.endswith("gate.weight"):
                weight.mul_(0.1)
                weight[:2, 0], weight[2:, 0] = 0.5, -0.5


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_load_balance_loss_balances_the_router(policy_of, kind, packing):
    """Of four experts two are taken for each token. The loss is 4 if they are always the same, and 2 if all are taken
    equally often: four times the sum, over experts, of how often one is taken times its mean probability."""
    policy = policy_of(kind)
    collapse(policy)
    batch = replace(batch_of(policy), advantages=torch.zeros(batch_of(policy).mask.shape))

    def trained(coef: float) -> tuple[list[float], VlmPolicy]:
        optim = {"lr": 0.02, "packing": packing, "microbatch_size": 4, "max_grad_norm": 100.0}
        learner = learner_of(copy.deepcopy(policy), algorithm={"aux_loss_coef": coef, "epochs": 1}, optim=optim)
        updates = [annotated_update(learner, batch, i).metrics for i in range(1, 31)]
        return [update.get("aux_loss", float("nan")) for update in updates], learner.policy

    losses, balanced = trained(0.1)
    assert 3.9 < losses[0] <= 4.001 and losses[-1] < 2.3, losses
    with torch.no_grad():
        after = float(balanced.evaluate(batch.inputs, batch.decisions, 1.0).aux_loss)
    assert 1.9 < after < 2.3
    _, untouched = trained(0.0)
    for before, now in zip(policy.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(before, now), "without the coefficient nothing balances it, and nothing else is wrong here"


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_load_balance_loss_counts_once_however_a_minibatch_is_cut(policy_of, kind):
    """A microbatch's own loss has the weight of its tokens. A split into copies of the same rows changes nothing."""
    policy = policy_of(kind)
    half = batch_of(policy)
    batch = TrainBatch.cat([half, half])
    batch = replace(batch, trajectory=torch.arange(2 * ROWS), advantages=torch.zeros(batch.mask.shape))
    rows = torch.arange(2 * ROWS)

    def loss_and_gradient(size: int) -> tuple[float, torch.Tensor]:
        sections = {"algorithm": {"aux_loss_coef": 0.5}, "optim": {"microbatch_size": size}}
        learner = learner_of(copy.deepcopy(policy), **sections)
        sums = learner._accumulate(learner._minibatch(batch, rows, moved=False), rows, True, True)
        gates = [p.grad for name, p, _ in learner.named_trained() if name.endswith("gate.weight")]
        return sum(part.loss for part in sums), torch.cat([gate.flatten() for gate in gates])

    once, twice = loss_and_gradient(2 * ROWS), loss_and_gradient(ROWS)
    with torch.no_grad():
        own = float(policy.evaluate(half.inputs, half.decisions, 1.0).aux_loss)
    assert once[0] == pytest.approx(0.5 * own, rel=CEILING * EPS)
    assert twice[0] == pytest.approx(once[0], rel=CEILING * EPS)
    assert once[1].abs().max() > 0
    assert (once[1] - twice[1]).abs().max() <= CEILING * EPS * once[1].abs().max()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"aux_loss_coef": 0.1}},
            r"aux_loss_coef = 0\.1: this model reports no auxiliary loss.*set it to 0",
        ),
        ({"optim": {"packing": True}}, "optim.packing: the decisions of OpenVLAPolicy all have the same length.*false"),
        ({"optim": {"microbatch_tokens": 9}}, "optim.microbatch_tokens = 9.*same length.*set optim.microbatch_size"),
    ],
)
def test_what_a_policy_does_not_have_is_refused_before_it_is_trained(sections, message):
    with pytest.raises(UsageError, match=message):
        learner_of(init_tiny("parallel", seed=0), **sections)


def test_a_model_without_experts_has_no_load_balance_loss(policy_of):
    with pytest.raises(UsageError, match="this model reports no auxiliary loss"):
        learner_of(policy_of("qwen2"), algorithm={"aux_loss_coef": 0.1})
