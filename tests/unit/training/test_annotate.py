"""Annotations: which network makes how many passes over a batch, what they give, and that updates without a pass of
their own end at the same weights."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fakes.decisions import annotated, annotated_update, nothing
from fakes.float_error import value_judge

import vlarl.training.learner
from vlarl.policies.tiny import init_tiny
from vlarl.training.annotate import Annotations, Needs, by_trajectory, last_observations, values_by_trajectory
from vlarl.training.batch import build_batch

ONCE = {"epochs": 1}
PPO = {"name": "ppo", "critic_hidden": (16,), "epochs": 1}
SEVERAL = {"minibatches": 3}
SEPARATE = {"kind": "separate"}
LOSS, REWARD = {"coef": 0.1, "place": "loss"}, {"coef": 0.1, "place": "reward"}

# The options of a run -> the passes over the whole batch that its annotation takes
OWN, REFERENCE, VALUES, CRITIC = "policy.evaluate", "reference.evaluate", "policy.values", "critic.values"
PASSES = {
    "one minibatch": ({"algorithm": ONCE}, []),
    "several minibatches": ({"algorithm": ONCE, "optim": SEVERAL}, [OWN]),
    "several epochs": ({"algorithm": {"epochs": 2}}, [OWN]),
    "engine": ({"algorithm": {"epochs": 2, "old_logprobs": "engine"}, "optim": SEVERAL}, []),
    "importance": ({"algorithm": ONCE | {"importance": "truncated"}}, [OWN]),
    "asynchronous": ({"algorithm": ONCE, "distributed": {"asynchronous": True}}, [OWN]),
    "selected by entropy": ({"algorithm": ONCE | {"entropy_top_fraction": 0.5}}, [OWN]),
    "KL in the loss": ({"algorithm": ONCE, "kl": LOSS}, [REFERENCE]),
    "KL in the loss, several": ({"algorithm": ONCE, "kl": LOSS, "optim": SEVERAL}, [OWN, REFERENCE]),
    "KL in the reward": ({"algorithm": ONCE, "kl": REWARD}, [OWN, REFERENCE]),
    "KL in the reward, engine": ({"algorithm": ONCE | {"old_logprobs": "engine"}, "kl": REWARD}, [OWN, REFERENCE]),
    "head": ({"algorithm": PPO}, [VALUES]),
    "head, several": ({"algorithm": PPO, "optim": SEVERAL}, [OWN]),
    "head, engine": ({"algorithm": PPO | {"old_logprobs": "engine"}, "optim": SEVERAL}, [VALUES]),
    "head, KL in the reward": ({"algorithm": PPO, "kl": REWARD}, [OWN, REFERENCE]),
    "critic": ({"algorithm": PPO, "critic": SEPARATE}, [CRITIC]),
    "critic, several": ({"algorithm": PPO, "critic": SEPARATE, "optim": SEVERAL}, [OWN, CRITIC]),
    "critic, KL in the loss": ({"algorithm": PPO, "critic": SEPARATE, "kl": LOSS}, [REFERENCE, CRITIC]),
    "critic, all": ({"algorithm": PPO, "critic": SEPARATE, "kl": REWARD}, [OWN, REFERENCE, CRITIC]),
}


@pytest.fixture
def tiny():
    return init_tiny("parallel", seed=3, chunk_length=2)


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


@contextmanager
def watched(learner):
    """Counts inside the block the rows that go through each network, by its name and its method."""
    rows: Counter[str] = Counter()
    inside: list[str] = []
    networks = {"policy": learner.policy} | ({} if learner.critic is None else {"critic": learner.critic})

    def counted(name: str, method: str):
        network = networks[name]
        original = getattr(network, method)

        def call(inputs, *arguments, **options):
            assert not torch.is_grad_enabled(), "nothing is trained here"
            assert not network.training, "without recomputed layers"
            rows[f"{inside[-1] if inside else name}.{method}"] += len(inputs)
            return original(inputs, *arguments, **options)

        return call

    @contextmanager
    def entered(in_place):
        inside.append("reference")
        with in_place():
            yield
        inside.pop()

    with pytest.MonkeyPatch.context() as patch:
        for name, network in networks.items():
            for method in ("evaluate", "values"):
                patch.setattr(network, method, counted(name, method))
        if learner.reference is not None:
            patch.setattr(learner.reference, "in_place", partial(entered, learner.reference.in_place))
        yield rows


@pytest.mark.parametrize("case", PASSES)
def test_each_network_makes_the_passes_that_are_needed(tiny, act, configure, build, case):
    options, passes = PASSES[case]
    learner, batch = build(tiny, configure(**options)), build_batch(act(tiny))
    with watched(learner) as rows:
        found = learner.annotate(batch, 1)
    assert rows == dict.fromkeys(passes, len(batch))
    needs_critic = options["algorithm"].get("name") == "ppo"
    assert (found.logprobs is not None) == (found.entropy is not None) == (OWN in passes)
    assert (found.ref_logprobs is not None) == (REFERENCE in passes)
    assert (found.values is not None) == needs_critic and found.last_values is None
    assert found.values is None or found.values.shape == (len(batch), 1)
    old = found.onto(batch, learner.config).old_logprobs
    if options["algorithm"].get("old_logprobs") == "engine":
        assert torch.equal(old, batch.decisions.engine_logprobs)
    else:
        assert old is found.logprobs


def test_minibatches_are_counted_as_they_are_and_not_as_configured(tiny, act, configure, build):
    """One decision is one minibatch, whatever `optim.minibatches` is."""
    learner, batch = build(tiny, configure(algorithm=ONCE, optim=SEVERAL)), build_batch(act(tiny, lengths=(1,)))
    assert learner.annotate(batch, 1).logprobs is None
    assert learner.update(annotated(learner, batch_with_advantages(batch), 1), 1, nothing).num_optimizer_steps == 1


def batch_with_advantages(batch):
    return replace(batch, advantages=torch.ones(batch.mask.shape))


@pytest.mark.parametrize("sort_by_length", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_log_probs_and_entropies_are_those_of_the_policy_in_the_order_of_the_rows(
    policy, act, configure, build, temperature, sort_by_length
):
    """In the company of the first epoch to the last bit; row by row to rounding."""
    optim = {"minibatches": 2, "microbatch_size": 2, "sort_by_length": sort_by_length}
    learner = build(policy, configure(rollout={"temperature": temperature}, optim=optim))
    batch = build_batch(act(policy, temperature))
    found = learner.annotate(batch, 1)
    assert found.logprobs.shape == found.entropy.shape == batch.mask.shape
    seen = []
    with torch.no_grad():
        for rows in learner._schedule(batch, 1)[:2]:
            for micro, part in learner._each_microbatch(batch, rows, lambda part: part):
                evaluation = policy.evaluate(part.inputs, part.decisions, temperature)
                assert torch.equal(found.logprobs[micro], evaluation.logprobs)
                assert torch.equal(found.entropy[micro], evaluation.entropy)
                seen += micro.tolist()
        for row in range(len(batch)):
            alone = batch.rows(torch.tensor([row])).to("cpu")
            evaluation = policy.evaluate(alone.inputs, alone.decisions, temperature)
            torch.testing.assert_close(found.logprobs[row], evaluation.logprobs[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(found.entropy[row], evaluation.entropy[0], atol=1e-4, rtol=0)
    assert sorted(seen) == list(range(len(batch)))
    executed = batch.mask
    engine = batch.decisions.engine_logprobs
    torch.testing.assert_close(found.logprobs[executed], engine[executed], atol=1e-4, rtol=0)


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("kind", ["head", "separate"])
def test_values_are_those_of_the_critic_in_the_order_of_the_rows(policy, act, configure, build, kind, minibatches):
    """Those of a head in the pass of the log-probs are those of a pass of their own."""
    optim = {"minibatches": minibatches, "microbatch_size": 2}
    learner = build(policy, configure(algorithm=PPO, critic={"kind": kind}, optim=optim))
    network = learner.critic or policy
    torch.nn.init.normal_(network.value_head.out.weight, generator=torch.Generator().manual_seed(1))
    batch = build_batch(act(policy))
    found = learner.annotate(batch, 1)
    assert len(found.values.unique()) == len(batch)
    for row in range(len(batch)):
        value_judge(network, batch.rows(torch.tensor([row])).to("cpu").inputs).check(found.values[row : row + 1])


@pytest.mark.parametrize("kind", ["head", "separate"])
def test_last_observations_have_values_in_their_order(policy, act, configure, build, kind, observation):
    learner = build(policy, configure(algorithm=PPO, critic={"kind": kind}, optim={"microbatch_size": 2}))
    network = learner.critic or policy
    torch.nn.init.normal_(network.value_head.out.weight, generator=torch.Generator().manual_seed(1))
    batch, last = build_batch(act(policy)), policy.process([observation(70 + number) for number in range(3)])
    with watched(learner) as rows:
        found = learner.annotate(batch, 1, last)
    assert rows == {CRITIC if kind == "separate" else VALUES: len(batch) + 3}
    assert found.last_values.shape == (3, 1) and found.values.shape == (len(batch), 1)
    for row in range(3):
        value_judge(network, last.rows(torch.tensor([row]))).check(found.last_values[row : row + 1])


def test_without_a_critic_last_observations_are_not_looked_at(tiny, act, configure, build, observation):
    learner = build(tiny, configure(algorithm=ONCE))
    with watched(learner) as rows:
        found = learner.annotate(build_batch(act(tiny)), 1, tiny.process([observation(0)]))
    assert found == Annotations() and not rows


def test_only_trajectories_that_did_not_terminate_have_a_value_at_their_end(trajectory):
    episodes = [
        trajectory([[0], [0]], terminated=True, seed=1),
        trajectory([[0]], seed=2),
        trajectory([[0]], terminated=True, seed=3),
        trajectory([[0], [0]], seed=4),
    ]
    assert last_observations(episodes) == [1, 3]
    batch = replace(build_batch(episodes), old_values=torch.arange(1.0, 7.0)[:, None])
    values = values_by_trajectory(batch, episodes, torch.tensor([[20.0], [40.0]]))
    assert [v.ravel().tolist() for v in values] == [[1, 2, 0], [3, 20], [4, 0], [5, 6, 40]]
    assert {v.dtype for v in values} == {np.dtype(np.float32)}


def test_where_all_trajectories_terminated_nothing_follows(trajectory):
    episodes = [trajectory([[0] * 3, [0] * 3], terminated=True)]
    assert last_observations(episodes) == []
    batch = replace(build_batch(episodes), old_values=torch.ones(2, 3))
    (values,) = values_by_trajectory(batch, episodes, None)
    assert values.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_values_of_a_batch_without_annotations_are_refused(trajectory):
    episodes = [trajectory([[0]])]
    with pytest.raises(AssertionError, match="annotate the batch first"):
        values_by_trajectory(build_batch(episodes), episodes, None)


def test_columns_are_split_by_trajectory(trajectory):
    episodes = [trajectory([[0]] * count, seed=count) for count in (2, 1, 3)]
    parts = by_trajectory(torch.arange(12.0).reshape(6, 2), episodes)
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7], [8, 9], [10, 11]]]


# Without a pass


class ForcedPass(Needs):
    """As if log-probs were always needed."""

    @classmethod
    def of(cls, config, num_minibatches, needs_critic):
        return replace(Needs.of(config, num_minibatches, needs_critic), logprobs=True)


UPDATES = {
    "grpo": {"algorithm": {"name": "grpo"}},
    "ratio of actions": {"algorithm": {"ratio_level": "action"}},
    "ratio of chunks": {"algorithm": {"ratio_level": "chunk", "aggregate": "sequence_mean"}},
    "ratio of sequences": {"algorithm": {"ratio_level": "sequence", "aggregate": "sequence_mean"}},
    "dual clip": {"algorithm": {"dual_clip": 3.0, "entropy_coef": 0.1}},
    "cpgd": {"algorithm": {"name": "cpgd"}},
    "reinforce": {"algorithm": {"name": "reinforce"}},
    "KL": {"algorithm": {"name": "grpo"}, "kl": LOSS},
    "ppo": {"algorithm": PPO},
    "ppo, critic": {"algorithm": PPO | {"gae_level": "step"}, "critic": SEPARATE},
    "KL limit": {"algorithm": {"max_approx_kl": 1e-3}},
}


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_without_a_pass_ends_at_the_weights_of_one_with_it(
    act, learner_batch, configure, build, monkeypatch, case
):
    """To the last bit, in two updates, of which the second does not begin at the weights that sampled."""
    sections = UPDATES[case] | {"optim": {"lr": 1e-3, "microbatch_size": 4}}
    sections["algorithm"] = sections["algorithm"] | ONCE
    outcomes = []
    for forced in (False, True):
        policy = init_tiny("parallel", seed=3, chunk_length=2)
        with monkeypatch.context() as patch:
            if forced:
                patch.setattr(vlarl.training.learner, "Needs", ForcedPass)
            learner = build(policy, configure(**sections))
            batch, metrics = learner_batch(learner, act(policy)), []
            start = weights(policy)
            for iteration in (1, 2):
                ready = annotated(learner, batch, iteration)
                assert (ready.learner_logprobs is not None) == (ready.old_logprobs is not None) == forced
                result = learner.update(ready, iteration, nothing)
                assert result.num_optimizer_steps == 1 and result.metrics["ratio_first_minibatch_error"] == 0.0
                metrics.append(result.metrics)
        outcomes.append((metrics, weights(policy)))
    (without, weights_without), (with_pass, weights_with) = outcomes
    assert any(not torch.equal(weights_with[name], start[name]) for name in start)
    assert all(torch.equal(weights_without[name], weights_with[name]) for name in start)
    for found, expected in zip(without, with_pass, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)
    assert without[1]["engine_mismatch_kl"] > 1e-6, "the engine is known to be behind, without a pass for it"
    assert without[1]["engine_logprob_error"] > 1e-3


def test_without_a_pass_the_engines_log_probs_change_its_metrics_alone(act, policy_batch, configure, build):
    outcomes = []
    for off in (0.0, 2.0):
        policy = init_tiny("parallel", seed=3, chunk_length=2)
        batch = policy_batch(policy, act(policy))
        engine = (batch.decisions.engine_logprobs - off).masked_fill(~batch.mask, float("nan"))
        batch = replace(batch, decisions=replace(batch.decisions, engine_logprobs=engine))
        learner = build(policy, configure(algorithm=ONCE, optim={"lr": 1e-3, "microbatch_size": 4}))
        metrics = annotated_update(learner, batch, 1).metrics
        assert metrics.pop("engine_logprob_error") == pytest.approx(off, abs=1e-4)
        assert metrics.pop("engine_mismatch_kl") == pytest.approx(np.exp(off) - 1 - off, abs=1e-3)
        outcomes.append((metrics, weights(policy)))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(outcomes[0][1][name], outcomes[1][1][name]) for name in outcomes[0][1])


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": ONCE, "optim": SEVERAL},
        {"algorithm": {"epochs": 2}},
        {"algorithm": {"epochs": 2, "old_logprobs": "engine"}},
    ],
)
def test_a_batch_without_annotations_is_refused_where_minibatches_are_several(
    tiny, act, policy_batch, configure, build, options
):
    learner, batch = build(tiny, configure(**options)), policy_batch(tiny, act(tiny))
    before = weights(tiny)
    with pytest.raises(ValueError, match="no log-probs of before the first step: annotate it first"):
        learner.update(batch, 1, nothing)
    assert learner.version == 0 and not learner.optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in tiny.named_parameters())
    assert annotated_update(learner, batch, 1).num_optimizer_steps > 1


def test_a_batch_without_annotations_is_trained_on_where_there_is_one_minibatch(
    tiny, act, policy_batch, configure, build
):
    learner = build(tiny, configure(algorithm=ONCE))
    result = learner.update(policy_batch(tiny, act(tiny)), 1, nothing)
    assert result.num_optimizer_steps == 1 and result.metrics["ratio_first_minibatch_error"] == 0.0
