"""A second dataset that is imitated during RL: its loss and gradient, its order, and what it must leave alone."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.decisions import annotated, annotated_update
from fakes.float_error import check_gradients, gradients_of, in_float64

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config, PtxConfig
from vlarl.data.imitation import build_ptx
from vlarl.policies.load import load_policy
from vlarl.policies.tiny import init_tiny
from vlarl.training.checkpoint import CheckpointStore, restore
from vlarl.training.learner import Learner
from vlarl.training.ptx import Ptx
from vlarl.training.state import TrainerState

COEF = 0.3


class Given:
    """Samples that are given one by one."""

    def __init__(self, pairs):
        self.pairs, self.taken = pairs, []

    def __len__(self):
        return len(self.pairs)

    def sample(self, index):
        self.taken.append(index)
        return self.pairs[index]


@pytest.fixture
def pairs(policy, observation):
    """Observations with actions within the robot's range."""
    rng = np.random.default_rng(0)
    shape = (policy.num_steps, policy.action_dim)
    return [(observation(seed), rng.uniform(-0.9, 0.9, shape).astype(np.float32)) for seed in range(7)]


def learner_of(policy, config: Config, samples, **ptx) -> Learner:
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    settings = PtxConfig(path="given", **{"coef": COEF, "batch_size": 5} | ptx)
    return Learner(policy, algorithm, config, torch.device("cpu"), ptx=Ptx(samples, policy, settings, config.run.seed))


def test_given_actions_become_the_decisions_that_act_turns_into_them(policy, act):
    """Of every bin: the two lowest ids decode to the same action, the second of them stands for both."""
    codec = policy.codec
    ids = torch.arange(codec.first_id + 1, codec.first_id + codec.num_bins)
    count = policy.num_steps * policy.action_dim
    ids = ids[: len(ids) // count * count].reshape(-1, count)
    decisions = policy.decisions_of([np.zeros((policy.num_steps, policy.action_dim), np.float32)])
    given = replace(decisions, sample=replace(decisions.sample, ids=ids))
    assert torch.equal(policy.decisions_of(policy.act(given)).sample.ids, ids)
    taken = act(policy)[0].transitions[0].decision
    again = policy.decisions_of(policy.act(taken))
    np.testing.assert_array_equal(policy.act(again), policy.act(taken))
    assert again.mask.all() and torch.equal(again.step, taken.step) and not again.engine_logprobs.any()


def test_the_gradient_is_that_of_the_cross_entropy_which_finetune_minimises(
    policy, pairs, configure, act, learner_batch
):
    """Added to the policy gradient, by its weight, in microbatches of any size."""
    samples = Given(pairs)

    def gradients(size: int, coef: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        config = configure(optim={"microbatch_size": size}, rollout={"temperature": 1.6})
        learner = learner_of(copy.deepcopy(policy), config, samples, coef=coef)
        batch = learner_batch(learner, act(policy))
        learner.policy.to(dtype)
        rows = torch.arange(len(batch))
        with in_float64() if dtype == torch.float64 else nullcontext():
            learner._gradients(batch, rows, False, True, True)
        return gradients_of(learner.policy)

    def imitated(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The gradient of `vlarl finetune`, on the same samples."""
        network = copy.deepcopy(policy).to(dtype)
        seen = [pairs[index] for index in samples.taken[-5:]]
        proprio = np.stack([o.proprio for o, _ in seen])
        rows = network.demo_rows([o.instruction for o, _ in seen], proprio, np.stack([a for _, a in seen]))
        frames = network.demo_frames(np.stack([o.images for o, _ in seen]))
        with in_float64() if dtype == torch.float64 else nullcontext():
            network.supervised_loss(rows, frames).backward()
        return gradients_of(network)

    exact_both, exact_one = (gradients(100, coef, torch.float64) for coef in (COEF, 0.0))
    exact, rounded = (
        {name: COEF * gradient for name, gradient in imitated(dtype).items()}
        for dtype in (torch.float64, torch.float32)
    )
    assert max(float(gradient.abs().max()) for gradient in exact.values()) > 0.01
    check_gradients({name: exact_both[name] - exact_one[name] for name in exact_both}, exact, rounded)
    plain = gradients(100, COEF)
    for size in (4, 1):
        check_gradients(gradients(size, COEF), exact_both, plain)


def test_the_metric_is_the_mean_of_all_tokens_whatever_the_microbatch(policy, pairs, configure, act, policy_batch):
    losses = []
    for size in (2, 100):
        learner = learner_of(copy.deepcopy(policy), configure(optim={"lr": 0.0, "microbatch_size": size}), Given(pairs))
        result = annotated_update(learner, policy_batch(policy, act(policy)), 1)
        losses.append(result.metrics["ptx_loss"])
    batch = Ptx(Given(pairs), policy, PtxConfig(path="given", batch_size=5), 0)
    parts = [batch.next_batch() for _ in range(result.num_optimizer_steps)]
    with torch.no_grad():
        means = [-policy.evaluate(part.inputs, part.decisions, 1.0).logprobs.mean() for part in parts]
    assert losses == pytest.approx([float(np.mean(means))] * 2, rel=1e-5)


def test_each_sample_is_taken_once_an_epoch_in_an_order_of_the_seed(policy, pairs):
    def taken(seed: int, steps: int = 7) -> list[int]:
        samples = Given(pairs)
        ptx = Ptx(samples, policy, PtxConfig(path="given", batch_size=5), seed)
        for _ in range(steps):
            ptx.next_batch()
        assert ptx.position == 5 * steps
        return samples.taken

    order = taken(0)
    assert [sorted(order[first : first + 7]) for first in range(0, 35, 7)] == [list(range(7))] * 5
    assert len({tuple(order[first : first + 7]) for first in range(0, 35, 7)}) > 1, "epochs differ"
    assert taken(0) == order != taken(1)


def test_a_weight_of_zero_is_no_second_dataset_to_the_bit(configure, act, policy_batch):
    weights = []
    for ptx in ({}, {"path": "experts", "coef": 0.0}, {"path": "experts", "coef": 1e-3, "episodes_per_task": 1}):
        policy = init_tiny("parallel", seed=3)
        config = configure(ptx=ptx, env={"task_ids": (0,)}, optim={"lr": 1e-3})
        built = build_ptx(config, policy)
        assert (built is None) == (ptx.get("coef", 0.0) == 0.0)
        algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
        learner = Learner(policy, algorithm, config, torch.device("cpu"), ptx=built)
        result = annotated_update(learner, policy_batch(policy, act(policy)), 1)
        assert ("ptx_loss" in result.metrics) == (built is not None)
        weights.append([p.detach().clone() for p in policy.parameters()])
    none, zero, some = weights
    assert all(torch.equal(a, b) for a, b in zip(none, zero, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(none, some, strict=True))


def test_while_the_critic_warms_up_nothing_is_imitated(policy, pairs, configure, act, learner_batch):
    algorithm = {"name": "ppo", "critic_hidden": (16,), "value_init_steps": 1}
    learner = learner_of(policy, configure(algorithm=algorithm, optim={"lr": 1e-2}), Given(pairs))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    batch = learner_batch(learner, act(policy))
    first = annotated_update(learner, batch, 1)
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(name.startswith("value_head.") for name in moved)
    assert learner.ptx.position == 0 and "ptx_loss" not in first.metrics
    assert "ptx_loss" in annotated_update(learner, batch, 2).metrics and learner.ptx.position == 10


def test_a_step_whose_imitated_loss_is_not_finite_is_skipped(configure, pairs, act, policy_batch):
    """The second of two optimizer steps takes the only broken sample: the first step is made, the second is not."""
    policy = init_tiny("parallel", seed=3)
    shape = (policy.num_steps, policy.action_dim)
    given = [(o, np.zeros(shape, np.float32)) for o, _ in pairs]
    order = Given(given)
    Ptx(order, policy, PtxConfig(path="given", batch_size=7), 0).next_batch()
    seen, action = given[order.taken[-1]]
    given[order.taken[-1]] = (replace(seen, proprio=np.full_like(seen.proprio, np.nan)), action)
    learner = learner_of(policy, configure(optim={"lr": 1e-2}), Given(given), batch_size=4)
    weights = []
    steps = learner.updating(annotated(learner, policy_batch(policy, act(policy)), 1), 1)
    for _ in range(2):
        next(steps)
        weights.append([p.detach().clone() for p in policy.parameters()])
    with pytest.raises(StopIteration) as end:
        next(steps)
    result = end.value.value
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (1, 1)
    assert np.isfinite(result.metrics["ptx_loss"])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_an_imitated_loss_that_is_not_finite_is_refused_though_its_gradient_is(configure, pairs, act, policy_batch):
    """Tokens without any probability: the loss is infinite, its gradient is not."""
    policy = init_tiny("parallel", seed=3)
    given = [(o, np.zeros((policy.num_steps, policy.action_dim), np.float32)) for o, _ in pairs]
    learner = learner_of(policy, configure(optim={"lr": 1e-2}, algorithm={"epochs": 1}), Given(given), batch_size=4)
    batch = policy_batch(policy, act(policy))
    evaluate, before = policy.evaluate, [p.detach().clone() for p in policy.parameters()]

    def impossible(inputs, decisions, temperature, **options):
        found = evaluate(inputs, decisions, temperature, **options)
        return replace(found, logprobs=found.logprobs - np.inf) if len(decisions) == 4 else found

    policy.evaluate = impossible
    result = annotated_update(learner, batch, 1)
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (0, 1)
    assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)
    assert all(torch.equal(p, weight) for p, weight in zip(policy.parameters(), before, strict=True))


def test_a_resumed_learner_continues_with_the_next_samples_bit_for_bit(
    tmp_path, policy, pairs, configure, act, policy_batch
):
    config = configure(optim={"lr": 1e-3})
    samples = Given(pairs)
    learner = learner_of(policy, config, samples)
    batch = policy_batch(policy, act(policy))
    annotated_update(learner, batch, 1)
    folder = CheckpointStore(tmp_path, 1).save("step_000001", learner, TrainerState(iteration=1))
    del samples.taken[:]
    expected = annotated_update(learner, batch, 2)
    again = Given(pairs)
    other = learner_of(load_policy(folder), config, again)
    restore(other, folder)
    assert other.ptx.position == 10
    assert annotated_update(other, batch, 2) == expected and again.taken == samples.taken
    for (name, ours), theirs in zip(other.policy.named_parameters(), learner.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_without_a_position_starts_at_the_first_sample(tmp_path, policy, pairs, configure, build):
    folder = CheckpointStore(tmp_path, 1).save("step_000001", build(policy, configure()), TrainerState(iteration=1))
    learner = learner_of(policy, configure(), Given(pairs))
    restore(learner, folder)
    assert learner.ptx.position == 0
