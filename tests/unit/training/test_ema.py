"""The average of the weights: its closed form, and that using it leaves the weights as they were."""

import pytest
import torch
from fakes.decisions import annotated_update

from vlarl.decisions import Sampling
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.run.parts import evaluated_average
from vlarl.training.ema import WeightAverage
from vlarl.training.swap import trained_weights
from vlarl.weights.sync import WeightSync


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize(("beta", "steps"), [(0.0, 3), (0.992, 30), (0.999, 4)])
def test_the_average_after_n_steps_is_the_closed_form(beta, steps):
    """(1 - beta) / (1 - beta^n) x the sum over i of beta^(n-i) w_i, for weights that go up by 1 a step."""
    policy = init_tiny("parallel", seed=1)
    start = weights(policy)
    average = WeightAverage(policy, beta)
    for _ in range(steps):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1.0)
        average.update()
    factors = [beta ** (steps - i) for i in range(1, steps + 1)]
    risen = sum(factor * i for i, factor in enumerate(factors, start=1)) / sum(factors)
    assert average.num_updates == steps
    for name in trained_weights(policy):
        exact = start[name].double() + risen
        # Each update rounds twice in float32, at values of at most `steps` and a little.
        bound = 2 * steps * (steps + 1) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(average.weights[name].double(), exact, atol=bound, rtol=0)


def test_the_first_weights_are_no_part_of_the_average_once_others_were_seen():
    """With beta 0.999 they would be nearly all of it."""
    policy = init_tiny("parallel", seed=1)
    average = WeightAverage(policy, 0.999)
    start = weights(policy)
    assert all(torch.equal(average.weights[name], start[name]) for name in average.weights), "before the first update"
    for value in (3.0, 5.0):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(value)
        average.update()
        if value == 3.0:
            assert all(torch.equal(w, torch.full_like(w, 3.0)) for w in average.weights.values())
    expected = (0.999 * 3.0 + 5.0) / 1.999
    for averaged in average.weights.values():
        torch.testing.assert_close(averaged, torch.full_like(averaged, expected), atol=1e-5, rtol=0)


def test_a_learner_averages_after_every_step_that_it_takes(policy, act, learner_batch, configure, build):
    """Each of four steps counts twice the one before; frozen weights and the critic are excluded."""
    policy.freeze("vision")
    config = configure(
        algorithm={"name": "ppo", "critic_hidden": (16,), "value_init_steps": 1},
        optim={"lr": 1e-3, "minibatches": 2},
        ema={"beta": 0.5},
    )
    learner = build(policy, config)
    assert not any("vision" in n or n.startswith("value_head") for n in learner.average.weights)
    batch, start = learner_batch(learner, act(policy)), weights(policy)
    annotated_update(learner, batch, 1)
    for name, average in learner.average.weights.items():
        assert torch.equal(average, start[name]), "a critic's warm-up doesn't count"
    seen, step = [], learner.optimizer.step

    def watched() -> None:
        step()
        seen.append(weights(policy))

    learner.optimizer.step = watched
    annotated_update(learner, batch, 2)
    assert len(seen) == 4  # two epochs of two minibatches
    for name, average in learner.average.weights.items():
        expected = sum(2.0**i * stepped[name].double() for i, stepped in enumerate(seen)) / 15  # 1 + 2 + 4 + 8
        torch.testing.assert_close(average.double(), expected, atol=1e-6, rtol=1e-6)


def evaluation(learner, engine):
    """The pair as a run makes it."""
    average = evaluated_average(learner)
    return WeightSync(learner, engine, lambda: engine.weights_changed(learner.version), average).for_evaluation()


def test_evaluating_the_average_leaves_the_weights_as_they_were(policy, observation, configure, build):
    learner = build(policy, configure(ema={"beta": 0.9}, eval={"use_ema": True}))
    engine = TorchEngine(policy, torch.device("cpu"))
    inputs = policy.process([observation(0)])
    for average in learner.average.weights.values():
        average.mul_(1.1)
    averages = {name: average.clone() for name, average in learner.average.weights.items()}
    before, places = weights(policy), {n: p.data_ptr() for n, p in policy.named_parameters()}
    newest = engine.generate(inputs, Sampling(1.0), [3]).engine_logprobs
    with evaluation(learner, engine):
        for name, parameter in trained_weights(policy).items():
            assert torch.equal(parameter, averages[name])
        assert not torch.equal(engine.generate(inputs, Sampling(1.0), [3]).engine_logprobs, newest)
    assert torch.equal(engine.generate(inputs, Sampling(1.0), [3]).engine_logprobs, newest)
    assert all(torch.equal(p, before[n]) and p.data_ptr() == places[n] for n, p in policy.named_parameters())
    assert all(torch.equal(average, averages[name]) for name, average in learner.average.weights.items())


def test_by_default_the_newest_weights_are_evaluated(configure, build):
    policy = init_tiny("parallel", seed=1)
    learner = build(policy, configure(ema={"beta": 0.9}))
    for average in learner.average.weights.values():
        average.zero_()
    before = weights(policy)
    with evaluation(learner, TorchEngine(policy, torch.device("cpu"))):
        assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())


def test_a_failed_evaluation_brings_the_weights_back(configure, build):
    policy = init_tiny("parallel", seed=1)
    learner = build(policy, configure(ema={"beta": 0.9}, eval={"use_ema": True}))
    for average in learner.average.weights.values():
        average.zero_()
    before = weights(policy)
    with (
        pytest.raises(RuntimeError, match="simulator"),
        evaluation(learner, TorchEngine(policy, torch.device("cpu"))),
    ):
        raise RuntimeError("the simulator went away")
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
