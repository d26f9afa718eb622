"""The loop's own steps with a real learner: what a KL in the reward costs, what is refused, who is left of a group."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.decisions import engine_logprobs, taken_ids, with_engine_logprobs
from fakes.groups import flat

import vlarl.loop
from vlarl.algorithms import build_algorithm
from vlarl.callbacks import Callbacks
from vlarl.config.schema import Config
from vlarl.decisions import TrainBatch
from vlarl.errors import ClusterError, UsageError, VlarlError
from vlarl.loop import REOPENING_PAUSES_S, estimated_batch, improve, refuse_unscored, reopened, score_evaluated
from vlarl.policies.distribution import token_logprobs
from vlarl.policies.tiny import init_tiny
from vlarl.rewards.combined import CombinedReward
from vlarl.rewards.outcome import SparseReward
from vlarl.rewards.safe import SafeReward
from vlarl.run.schedule import Schedule
from vlarl.training.learner import Learner
from vlarl.training.state import TrainerState
from vlarl.types import EpisodeResult, EvalResult, Trajectory, UpdateResult

RETURNS = {"name": "reinforce", "gamma": 1.0, "epochs": 1}  # the advantage of a step is what follows it


class WatchedLearner(Learner):
    """Keeps the batches that it is given."""

    def update(
        self, batch: TrainBatch, iteration: int, on_step: Callable[[int, int], None], iterations: int | None = None
    ) -> UpdateResult:
        self.batches = [*getattr(self, "batches", []), batch]
        return super().update(batch, iteration, on_step, iterations)


@dataclass
class FakeSession:
    """As much of a session as an update needs."""

    config: Config
    state: TrainerState = field(default_factory=lambda: TrainerState(iteration=1))
    notes: list[str] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.config)

    @property
    def progress(self) -> SimpleNamespace:
        return SimpleNamespace(note=self.notes.append, update=lambda done, planned: None)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        yield

    def seconds(self, name: str) -> float:
        return 1.0

    refused: bool = False

    def start_update(self) -> None:
        pass

    def refuse_update(self) -> None:
        self.refused = True

    def record_update(self, result: UpdateResult) -> dict[str, float]:
        return {f"train/{name}": value for name, value in result.metrics.items()}


def parts_of(policy, config: Config) -> SimpleNamespace:
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    learner = WatchedLearner(policy, algorithm, config, torch.device("cpu"))
    called: list[int] = []
    return SimpleNamespace(
        policy=policy,
        algorithm=algorithm,
        learner=learner,
        readable=list,
        called=called,
        make_way=lambda: called.append(len(getattr(learner, "batches", []))),
    )


def rewarded(episode: Trajectory, value: float) -> Trajectory:
    """Each executed step is worth so much."""
    return episode.with_rewards(
        [np.where(np.arange(len(t.rewards)) < t.num_executed, np.float32(value), 0) for t in episode.transitions]
    )


@torch.no_grad()
def logprobs(policy, episode: Trajectory) -> torch.Tensor:
    inputs = policy.process([t.observation for t in episode.transitions])
    ids = torch.from_numpy(np.stack([taken_ids(t) for t in episode.transitions]))
    return token_logprobs(policy.score(inputs, ids).logits, ids - policy.codec.first_id, 1.0)


def penalties(policy, start, episode: Trajectory) -> np.ndarray:
    """[S] the KL of each executed step from the start, by hand: k1, summed over the step's tokens."""
    gap = (logprobs(policy, episode) - logprobs(start, episode)).reshape(
        len(episode.transitions), -1, policy.action_dim
    )
    executed = [row[: t.num_executed].sum(dim=1) for row, t in zip(gap, episode.transitions, strict=True)]
    return torch.cat(executed).numpy()


@pytest.fixture
def tiny():
    return init_tiny("parallel", seed=3, chunk_length=2)


@pytest.fixture
def strayed(tiny, act, configure):
    """Parts whose policy has moved away from its reference, the policy at the start, and an episode.

    The engine's log-probs are far off, as those of another precision are, and must not be charged for.
    """
    config = configure(kl={"coef": 0.25, "place": "reward"}, algorithm=RETURNS)
    parts, start = parts_of(tiny, config), copy.deepcopy(tiny)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    _, episode = act(tiny, lengths=(1, 3))
    off = tuple(with_engine_logprobs(t, engine_logprobs(t) + 3) for t in episode.transitions)
    return parts, config, start, rewarded(replace(episode, transitions=off), 1.0)


def by_step(advantages: torch.Tensor, episode: Trajectory, action_dim: int) -> np.ndarray:
    """[S] advantages of executed steps from those of tokens [T, K*D]."""
    rows = advantages.reshape(len(episode.transitions), -1, action_dim)[:, :, 0]
    return torch.cat([row[: t.num_executed] for row, t in zip(rows, episode.transitions, strict=True)]).numpy()


def test_a_kl_in_the_reward_lowers_each_steps_reward_by_its_coefficient_times_the_kl(strayed, tiny):
    parts, config, start, episode = strayed
    kl = penalties(tiny, start, episode)
    assert len(kl) == 5 and np.abs(kl).max() > 0.05  # three chunks of two, the last step never ran
    batch = estimated_batch(parts, config, [episode], 1)
    followed = np.cumsum((1.0 - 0.25 * kl)[::-1])[::-1]  # the rewards from each step on
    np.testing.assert_allclose(by_step(batch.advantages, episode, tiny.action_dim), followed, atol=1e-4)


def test_a_kl_in_the_reward_reaches_the_update(strayed, tiny):
    parts, config, start, episode = strayed
    kl = penalties(tiny, start, episode)
    metrics = improve(parts, FakeSession(config), [episode])
    (batch,) = parts.learner.batches
    assert parts.called == [0, 1], "recordings make way before the update, and after it"
    followed = np.cumsum((1.0 - 0.25 * kl)[::-1])[::-1]
    np.testing.assert_allclose(by_step(batch.advantages, episode, tiny.action_dim), followed, atol=1e-4)
    assert metrics["train/kl_coef"] == 0.25
    num_tokens = len(kl) * tiny.action_dim
    assert metrics["train/kl_ref"] == pytest.approx(kl.sum() / num_tokens, abs=1e-4), "measured before the step"


def test_a_policy_that_has_not_moved_is_charged_nothing_whatever_its_engine_says(tiny, act, configure):
    config = configure(kl={"coef": 0.25, "place": "reward"}, algorithm=RETURNS)
    parts = parts_of(tiny, config)
    (episode,) = act(tiny, lengths=(2,))
    off = tuple(with_engine_logprobs(t, engine_logprobs(t) + 3) for t in episode.transitions)
    batch = estimated_batch(parts, config, [rewarded(replace(episode, transitions=off), 1.0)], 1)
    np.testing.assert_array_equal(by_step(batch.advantages, episode, tiny.action_dim), [4, 3, 2, 1])


@pytest.mark.parametrize(("place", "passes"), [("loss", 1), ("reward", 2)])
def test_the_learners_own_log_probs_cost_a_pass_only_where_they_are_needed(tiny, act, configure, place, passes):
    """With one epoch of one minibatch, a term of the loss needs those of the reference alone."""
    config = configure(kl={"coef": 0.25, "place": place}, algorithm=RETURNS)
    parts = parts_of(tiny, config)
    evaluate, seen = tiny.evaluate, []

    def counted(inputs, decisions, temperature, **options):
        seen.append(len(inputs))
        return evaluate(inputs, decisions, temperature, **options)

    episodes = act(tiny)
    tiny.evaluate = counted
    batch = estimated_batch(parts, config, episodes, 1)
    assert seen == [6] * passes
    assert batch.ref_logprobs is not None and (batch.learner_logprobs is not None) == (place == "reward")


def test_values_of_a_critic_and_of_the_last_observation_make_the_advantages(tiny, act, configure):
    """By hand: without rewards and with lambda 0, V(next) - V, where nothing follows an episode that terminated.

    A segment that its episode continues after is bootstrapped as one that the time limit cut off.
    """
    options = {"name": "ppo", "critic_hidden": (16,), "gamma": 1.0, "gae_lambda": 0.0, "normalize_advantages": "none"}
    config = configure(algorithm=options)
    parts = parts_of(tiny, config)
    torch.nn.init.normal_(tiny.value_head.out.weight, generator=torch.Generator().manual_seed(1))
    cut_off, terminated, segment = act(tiny, lengths=(2, 2, 2))
    segment = replace(segment, terminated=False, truncated=False, continues=True)
    assert terminated.terminated and not cut_off.terminated
    batch = estimated_batch(parts, config, [cut_off, terminated, segment], 1)
    expected = []
    for episode in (cut_off, terminated, segment):
        seen = [t.observation for t in episode.transitions] + [episode.final_observation]
        with torch.no_grad():
            values = [float(tiny.values(tiny.process([observed]))[0, 0]) for observed in seen]
        values[-1] = 0.0 if episode.terminated else values[-1]
        expected += [after - before for before, after in zip(values, values[1:], strict=False)]
    np.testing.assert_allclose(batch.advantages[:, 0], expected, atol=1e-4)
    np.testing.assert_allclose(batch.returns[:, 0], batch.advantages[:, 0] + batch.old_values[:, 0], atol=1e-6)


def test_episodes_that_all_terminated_have_no_last_values(tiny, act, configure):
    config = configure(algorithm={"name": "ppo", "critic_hidden": (16,)})
    parts, processed = parts_of(tiny, config), []
    _, episode = act(tiny, lengths=(1, 2))
    tiny.process = processed.append
    batch = estimated_batch(parts, config, [episode], 1)
    assert not processed and batch.returns.shape == (2, 1)


def test_an_update_without_a_finite_step_ends_the_run_and_leaves_the_weights(tiny, act, configure):
    config = configure(algorithm=RETURNS | {"epochs": 3}, optim={"lr": 0.5})
    parts, before = parts_of(tiny, config), copy.deepcopy(tiny.state_dict())
    broken = rewarded(act(tiny, lengths=(2,))[0], float("nan"))
    with pytest.raises(
        VlarlError,
        match=r"iteration 1: the loss or the gradient was not finite in any of 3 steps, .*Lower optim.lr \(now 0.5\)"
        r" and resume",
    ):
        improve(parts, FakeSession(config), [broken])
    assert all(torch.equal(weight, before[name]) for name, weight in tiny.state_dict().items())
    assert not parts.learner.optimizer.state


@pytest.mark.parametrize("status", ["reward_failed", "ok"])
def test_a_reward_that_fails_on_every_episode_ends_the_run_however_few_there_are(trajectory, status):
    """`ok`: with reward.fallback zero their reward is 0."""
    failed = replace(trajectory([[1]], seed=1), status=status, reward_error="KeyError: 'score'")
    crashed, fine = replace(trajectory([[1]], seed=2), status="crashed"), trajectory([[1]], seed=3)
    refuse_unscored(4, [failed, crashed, fine])
    refuse_unscored(4, [crashed])
    with pytest.raises(
        VlarlError, match="iteration 4: the reward failed on all 2 episodes.*KeyError: 'score'"
    ) as stopped:
        refuse_unscored(4, [failed, crashed, failed])
    assert failed.task.episode_id in str(stopped.value) and stopped.value.exit_code == 1


def test_what_is_left_of_a_group_makes_no_update(tiny, act, configure):
    config = configure()
    parts, session = parts_of(tiny, config), FakeSession(config)
    left = flat((rewarded(act(tiny, lengths=(2,))[0], 1.0),), sizes=(8,))
    assert improve(parts, session, left) == {"train/kept_trajectories": 0.0}
    assert session.notes == ["iteration 1: no group has episodes that differ: nothing to learn from"]
    assert not hasattr(parts.learner, "batches") and parts.learner.version == 0


class NotingReward(SparseReward):
    """Notes how many episodes it is given at once, and fails on some."""

    batch_size = 4

    def __init__(self, fails: bool) -> None:
        self.fails, self.batches = fails, []

    def score_all(self, trajectories):
        self.batches.append(len(trajectories))
        if self.fails:
            raise ValueError("no")
        return super().score_all(trajectories)


def evaluated(trajectory, count: int) -> tuple[dict[int, EpisodeResult], dict[int, Trajectory]]:
    episodes = {index: trajectory([[0.0]], success=True, seed=index) for index in range(count)}
    return {index: EpisodeResult.of(episode, "x") for index, episode in episodes.items()}, episodes


def test_an_evaluation_is_scored_by_the_configured_reward_in_its_batches(trajectory):
    reward = NotingReward(fails=False)
    parts = SimpleNamespace(reward=SafeReward(reward))
    session = SimpleNamespace(guard=SimpleNamespace(check=lambda: None))
    results, episodes = evaluated(trajectory, 6)
    assert [result.episode_return for result in results.values()] == [0.0] * 6
    scored = score_evaluated(parts.reward.for_evaluation(6), session, results, episodes)
    assert [scored[index].episode_return for index in range(6)] == [1.0] * 6 and reward.batches == [4, 2]
    assert parts.reward._judged == 0, "the fraction of failures among rollouts is not changed"


def test_an_evaluation_has_the_parts_of_a_combined_reward(trajectory):
    reward = SafeReward(CombinedReward({"sparse": SparseReward()}, {"sparse": 0.5}))
    session = SimpleNamespace(guard=SimpleNamespace(check=lambda: None))
    scored = score_evaluated(reward.for_evaluation(1), session, *evaluated(trajectory, 1))
    assert (scored[0].episode_return, scored[0].reward_parts) == (0.5, {"sparse": 1.0})


def test_a_reward_that_fails_on_an_evaluation_ends_the_run_with_its_cause(trajectory):
    parts = SimpleNamespace(reward=SafeReward(NotingReward(fails=True), retries=0))
    session = SimpleNamespace(state=SimpleNamespace(iteration=4), guard=SimpleNamespace(check=lambda: None))
    with pytest.raises(
        VlarlError, match=r"evaluation after iteration 4: the reward failed on .*ValueError: no.*and resume"
    ):
        score_evaluated(parts.reward.for_evaluation(8), session, *evaluated(trajectory, 8))


@pytest.mark.parametrize("reads_images", [True, False])
def test_an_evaluation_gives_images_to_a_reward_that_reads_them_and_drops_all_others(
    monkeypatch, trajectory, reads_images
):
    """Whichever episode ends first, results are in the order of the tasks. Without images all are scored at the end."""
    seen: list[list[int]] = []  # images that the reward was given, by episode and call
    recorded: list[EvalResult] = []
    shown: list[tuple[int, int]] = []
    ended_by_then: list[int] = []  # episodes that were shown before each call

    class Looking(NotingReward):
        def score_all(self, trajectories):
            ended_by_then.append(len(shown))
            seen.append([len(t.transitions[0].observation.images) for t in trajectories])
            return super().score_all(trajectories)

    reward = Looking(fails=False)
    reward.reads_images = reads_images
    results, episodes = evaluated(trajectory, 6)
    ended = [(index, results[index], episodes[index]) for index in (5, 0, 2, 1, 4, 3)]
    monkeypatch.setattr(vlarl.loop, "evaluate_policy", lambda *arguments: iter(ended))
    session = SimpleNamespace(
        config=Config(),
        state=TrainerState(),
        schedule=Schedule(Config()),
        timed=lambda name: nullcontext(),
        guard=SimpleNamespace(check=lambda: None),
        progress=SimpleNamespace(evaluating=lambda done, total: shown.append((done, total))),
        record_evaluation=lambda result: recorded.append(result) or {},
    )
    weights = SimpleNamespace(for_evaluation=nullcontext)
    parts = SimpleNamespace(reward=SafeReward(reward), eval_tasks=[0] * 6, collector=None, weights=weights)
    vlarl.loop.evaluate(parts, session)
    assert seen == ([[1] * 4, [1] * 2] if reads_images else [[0] * 4, [0] * 2])
    assert ended_by_then == ([3, 6] if reads_images else [6, 6]), "a batch with images is scored as soon as it is full"
    assert [(e.task.seed, e.episode_return) for e in recorded[0].episodes] == [(i, 1.0) for i in range(6)]
    assert shown == [(i, 6) for i in range(1, 7)]


@pytest.mark.parametrize("refusal", [ClusterError, UsageError])
def test_a_run_is_opened_again_while_the_cluster_still_names_a_machine_that_is_gone(monkeypatch, refusal):
    """Its CPUs can't be reserved: the error for the user is not final then."""
    opened: list[object] = [
        refusal("has not reserved 2 CPUs"),
        refusal("has not reserved 2 CPUs"),
        ("parts", "session"),
    ]
    pauses: list[float] = []

    def open_run(*arguments: object) -> object:
        if isinstance(next_one := opened.pop(0), VlarlError):
            raise next_one
        return next_one

    monkeypatch.setattr(vlarl.loop, "open_run", open_run)
    monkeypatch.setattr(vlarl.loop.time, "sleep", pauses.append)
    assert reopened(Config(), Path("run"), Callbacks()) == ("parts", "session")
    assert pauses == list(REOPENING_PAUSES_S) and not opened


def test_a_run_that_can_not_be_opened_again_ends_with_the_last_refusal(monkeypatch):
    def open_run(*arguments: object) -> None:
        raise UsageError("has not reserved 2 CPUs")

    monkeypatch.setattr(vlarl.loop, "open_run", open_run)
    monkeypatch.setattr(vlarl.loop.time, "sleep", lambda seconds: None)
    with pytest.raises(UsageError, match="has not reserved"):
        reopened(Config(), Path("run"), Callbacks())
