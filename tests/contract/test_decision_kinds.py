"""Decisions of other kinds than action tokens go through the real loop: sampled, evaluated, trained on, saved.

Texts that differ in length and Gaussian chains (tests/fakes/kinds.py), with GRPO and PPO, on problems whose answers are
known. What the loop, the learner and the algorithms know of a decision is its log-probs, its mask and its step map.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.kinds import POINTS, WORDS, ChainPolicy, PointPool, TablePolicy, TextPolicy, WordPool

from vlarl.algorithms import build_algorithm
from vlarl.algorithms.losses import probability_ratio
from vlarl.config.schema import Config
from vlarl.data.imitation import build_ptx
from vlarl.decisions import Decisions, Sampling
from vlarl.errors import UsageError
from vlarl.evaluation.run import without_images
from vlarl.loop import estimated_batch, run
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.trace import NoTrace
from vlarl.rewards.base import Reward
from vlarl.rewards.outcome import DenseReward, SparseReward
from vlarl.rewards.safe import SafeReward
from vlarl.rollout.collector import Collector
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.rollout.tasks import TaskSampler, evaluation_tasks
from vlarl.run.parts import Parts
from vlarl.run.session import Session
from vlarl.training.batch import build_batch
from vlarl.training.checkpoint import CheckpointStore
from vlarl.training.learner import Learner
from vlarl.training.state import TrainerState
from vlarl.types import Task, Trajectory
from vlarl.weights.sync import WeightSync

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """A policy, its environments and its reward, and what suits its parameters."""

    policy: type[TablePolicy]
    pool: type[WordPool] | type[PointPool]
    reward: type[Reward]
    lr: float
    entropy_coef: float


KINDS = {
    "text": Kind(TextPolicy, WordPool, SparseReward, 0.2, 0.02),
    "chain": Kind(ChainPolicy, PointPool, DenseReward, 0.1, 0.0),
}


def config_of(kind: Kind, **sections) -> Config:
    options = {
        "run": {"iterations": 30, "seed": 2},
        "rollout": {"num_groups": 6, "group_size": 16, "temperature": 1.0},
        "eval": {"interval": 0, "states_per_task": 1, "videos": 0},
        "optim": {"lr": kind.lr, "minibatches": 2, "microbatch_size": 64, "max_grad_norm": 100.0},
        "critic": {"lr": 0.1},
        "checkpoint": {"interval": 0, "best_return": False},
        "logging": {"tensorboard": False, "report": False},
    }
    for section, given in sections.items():
        options[section] = options.get(section, {}) | given
    return Config.model_validate(options)


def parts_of(kind: Kind, config: Config) -> Parts:
    policy, pool = kind.policy(), kind.pool()
    engine = TorchEngine(policy, CPU)
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    learner = Learner(policy, algorithm, config, CPU, ptx=build_ptx(config, policy))
    return Parts(
        policy=policy,
        pool=pool,
        engine=engine,
        collector=Collector(pool, policy, engine),
        sampler=TaskSampler(config, pool.spec),
        reward=SafeReward(kind.reward()),
        algorithm=algorithm,
        learner=learner,
        weights=WeightSync(learner, engine, lambda: engine.weights_changed(learner.version), None),
        eval_tasks=evaluation_tasks(pool.spec, None, 1, config.run.seed),
        open_store=lambda folder: CheckpointStore(folder, config.checkpoint.keep),
        close=pool.close,
    )


def session_of(config: Config, parts: Parts, folder: Path) -> Session:
    directory = RunDirectory.create(folder, "run")
    lock = directory.claim().__enter__()
    store = parts.open_store(directory.checkpoints)
    return Session(config, directory, parts.learner, store, TrainerState(), lock, NoTrace())


def collected(parts: Parts, iteration: int = 1) -> list[Trajectory]:
    tasks = parts.sampler.get_batch(iteration)
    ended = dict(parts.collector.episodes(tasks, Sampling(1.0)))
    return parts.reward.score_all([ended[index].trajectory for index in range(len(tasks))])


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


# The contract


def test_a_row_samples_the_same_alone_and_in_any_batch(kind):
    policy = kind.policy()
    pool, seeds = kind.pool(), [5, 6, 7, 8]
    tasks = [task.task_id for task in pool.spec.tasks]
    observations = pool.reset(range(4), [Task(pool.spec.name, tasks[i % len(tasks)], 0, i) for i in range(4)])
    engine = TorchEngine(policy, CPU)
    together = engine.generate(policy.process(observations), Sampling(1.0), seeds)
    alone = [engine.generate(policy.process([o]), Sampling(1.0), [s]) for o, s in zip(observations, seeds, strict=True)]
    assert policy.act(together)[0] is not None
    for row, one in enumerate(alone):
        width = one.mask.shape[1]
        assert torch.equal(together.mask[row, :width], one.mask[0]) and not together.mask[row, width:].any()
        assert torch.equal(together.engine_logprobs[row][together.mask[row]], one.engine_logprobs[0][one.mask[0]])
        np.testing.assert_array_equal(policy.act(together)[row], policy.act(one)[0])
    rejoined = Decisions.cat(alone)
    assert torch.equal(rejoined.mask, together.mask) and torch.equal(rejoined.step, together.step)


def test_the_policy_finds_its_own_decisions_as_likely_as_the_engine_did(kind):
    parts = parts_of(kind, config_of(kind))
    batch = build_batch(collected(parts)).to("cpu")
    found = parts.policy.evaluate(batch.inputs, batch.decisions, 1.0)
    torch.testing.assert_close(found.logprobs[batch.mask], batch.decisions.engine_logprobs[batch.mask])


# The answer


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("grpo", {}),
        ("grpo", {"ratio_level": "action"}),
        ("grpo", {"ratio_level": "chunk"}),
        ("ppo", {"gae_level": "chunk"}),
        ("ppo", {"gae_level": "step"}),
        ("ppo", {"gae_level": "token"}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "-".join(value.values()) or "token",
)
def test_the_answer_is_learned_in_the_real_loop(kind, algorithm, options, tmp_path):
    shared = {"name": algorithm, "epochs": 2, "clip_low": 0.2, "clip_high": 0.2, "entropy_coef": kind.entropy_coef}
    config = config_of(kind, algorithm=shared | options)
    parts = parts_of(kind, config)
    summary = run(parts, session_of(config, parts, tmp_path))
    assert summary.success_before == 0.0 and summary.success_after == 1.0
    observations = parts.pool.reset(range(len(parts.eval_tasks)), parts.eval_tasks)
    decisions = parts.engine.generate(parts.policy.process(observations), Sampling(0.0), [0] * len(observations))
    if kind.policy is TextPolicy:
        assert parts.policy.act(decisions) == list(WORDS)
    else:
        np.testing.assert_allclose(np.stack(parts.policy.act(decisions)), POINTS, atol=0.25)
    assert decisions.version.tolist() == [parts.learner.version] * len(decisions) and parts.learner.version > 5


# What each fact of a decision is for: break one of them, and one of these fails


def batch_and_trajectories(kind: Kind, **sections):
    config = config_of(kind, **sections)
    parts = parts_of(kind, config)
    trajectories = parts.algorithm.with_learning_signal(collected(parts))
    batch = estimated_batch(parts, config, trajectories, 1)
    return parts, config, trajectories, batch.to("cpu")  # with its inputs joined


def test_padding_of_shorter_texts_counts_for_nothing():
    """The loss and its gradient are those of each text alone, weighted by its tokens."""
    kind = KINDS["text"]
    parts, config, trajectories, batch = batch_and_trajectories(kind, algorithm={"name": "reinforce"})
    lengths = batch.mask.sum(dim=1)
    assert int(lengths.min()) < int(lengths.max()), "texts of several lengths"
    weights = torch.where(batch.mask, 1 / batch.mask.sum(), 0.0)
    loss = parts.algorithm.loss(
        parts.policy.evaluate(batch.inputs, batch.decisions, 1.0),
        replace(batch, weights=weights, old_logprobs=batch.decisions.engine_logprobs),
        value_weight=1.0,
        kl_coef=0.0,
        train_policy=True,
    )
    (gradient,) = torch.autograd.grad(loss.total, [parts.policy.logits])
    expected = torch.zeros_like(parts.policy.logits)
    total = int(lengths.sum())
    for row in range(len(batch)):
        width = int(lengths[row])
        only = batch.rows(slice(row, row + 1))
        cut = replace(
            only.decisions,
            sample=replace(only.decisions.sample, ids=only.decisions.sample.ids[:, :width]),
            engine_logprobs=only.decisions.engine_logprobs[:, :width],
            mask=only.decisions.mask[:, :width],
            step=only.decisions.step[:, :width],
        )
        logprobs = parts.policy.evaluate(only.inputs, cut, 1.0).logprobs  # at the ratio 1 its gradient is the ratio's
        surrogate = -(logprobs * only.advantages[:, :width]).sum() / total
        expected += torch.autograd.grad(surrogate, [parts.policy.logits])[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_reward_of_a_text_falls_on_its_last_token_whatever_its_length():
    """PPO at the level of tokens, a critic of zeros and no discount within a step: the advantage is the reward."""
    kind = KINDS["text"]
    options = {"name": "ppo", "gae_level": "token", "gae_lambda": 0.0, "gamma": 0.5, "normalize_advantages": "none"}
    parts, config, trajectories, batch = batch_and_trajectories(kind, algorithm=options)
    for row, trajectory in enumerate(trajectories):
        length = int(batch.mask[row].sum())
        advantages = batch.advantages[row, :length].tolist()
        assert advantages == [0.0] * (length - 1) + [float(trajectory.success)]
        assert batch.value_mask[row].tolist() == batch.mask[row].tolist()


def test_steps_that_were_not_executed_count_for_nothing_and_each_step_has_its_own_reward():
    """A chain's chunk of two steps, of which the second decision executes one."""
    kind = KINDS["chain"]
    options = {"name": "reinforce", "gamma": 1.0}
    parts, config, trajectories, batch = batch_and_trajectories(kind, algorithm=options)
    assert len(batch) == 2 * len(trajectories)
    for index, trajectory in enumerate(trajectories):
        first, second = trajectory.transitions
        to_go = np.cumsum(np.float32([*first.rewards, second.rewards[0]])[::-1])[::-1]
        whole, cut = batch.rows(slice(2 * index, 2 * index + 2)).advantages
        assert batch.mask[2 * index].all() and batch.mask[2 * index + 1].tolist() == [True, True, False, False]
        np.testing.assert_allclose(whole.numpy(), np.repeat(to_go[:2], 2), rtol=1e-5)
        np.testing.assert_allclose(cut.numpy()[:2], np.repeat(to_go[2:], 2), rtol=1e-5)


def test_a_ratio_of_an_action_is_that_of_its_environment_step():
    """Log-ratios of an action add up over the elements that the step map gives it, and over no others."""
    step = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    log_ratio = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [1.0, -0.5, 0.25, 0.0, 0.125]])
    ratio = probability_ratio(log_ratio, "action", step)
    sums = torch.tensor([[0.3, 0.3, 1.2, 1.2, 1.2], [1.0, -0.25, -0.25, 0.125, 0.125]])
    torch.testing.assert_close(ratio, sums.exp())


def test_each_decision_keeps_the_version_of_the_weights_that_made_it(kind):
    parts = parts_of(kind, config_of(kind))
    parts.engine.version = 4
    first = collected(parts)
    parts.engine.version = 5
    second = collected(parts, 2)
    assert {t.version for trajectory in first for t in trajectory.transitions} == {4}
    assert {trajectory.policy_version for trajectory in second} == {5}
    batch = build_batch([*first, *second])
    expected = [4] * sum(len(t.transitions) for t in first) + [5] * sum(len(t.transitions) for t in second)
    assert batch.decisions.version.tolist() == expected


def test_a_distance_of_actions_is_refused_for_a_policy_that_has_none(kind):
    config = config_of(kind, algorithm={"name": "grpo", "action_reconstruction_coef": 0.5})
    with pytest.raises(UsageError, match=r"algorithm.action_reconstruction_coef = 0.5: this policy"):
        parts_of(kind, config)


def test_an_option_of_sampling_that_a_policy_does_not_take_is_refused(kind):
    parts = parts_of(kind, config_of(kind))
    with pytest.raises(UsageError, match="not sampled with top_k"):
        list(parts.collector.episodes(parts.eval_tasks, Sampling(1.0, top_k=3)))


def test_a_learner_with_a_reference_refuses_a_batch_without_its_log_probs(kind):
    parts, config, _, batch = batch_and_trajectories(kind, kl={"coef": 0.1})
    with pytest.raises(ValueError, match="no log-probs of the reference"):
        parts.learner.update(replace(batch, ref_logprobs=None), 1, lambda done, total: None)


def test_what_is_scored_or_trained_on_carries_no_more_than_is_read(kind):
    """Rewards read observations, the learner reads inputs; an evaluated episode keeps neither."""
    trajectory = collected(parts_of(kind, config_of(kind)))[0]
    for shown, inputs, images in (
        (trajectory, 1, 1),
        (trajectory.without_inputs(), 0, 1),
        (trajectory.without_images(), 1, 0),
        (without_images(trajectory), 0, 0),
    ):
        assert {int(t.inputs is not None) for t in shown.transitions} == {inputs}
        assert {len(t.observation.images) for t in shown.transitions} == {images}
        assert [t.rewards.tolist() for t in shown.transitions] == [t.rewards.tolist() for t in trajectory.transitions]
    assert len(trajectory.without_images().final_observation.images) == 1, "the critic may have to read it"
    assert len(without_images(trajectory).final_observation.images) == 0
