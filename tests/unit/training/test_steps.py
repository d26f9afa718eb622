"""What an optimizer step is made of, through the learner: clipped gradients and AdamW's betas."""

import copy

import pytest
import torch
from fakes.decisions import annotated_update

from vlarl.policies.tiny import init_tiny

PPO = {"name": "ppo", "critic_hidden": (16,), "epochs": 1}


@pytest.fixture
def tiny():
    return init_tiny("parallel", seed=3, chunk_length=2)


def flat(parameters) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double()


def gradients(learner, batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Of the policy and of a critic apart from it, as the optimizers saw them in one step."""
    metrics = annotated_update(learner, batch, 1).metrics
    critic = [] if learner.critic is None else [flat(learner.critic.parameters())]
    return flat(learner.policy.parameters()), critic[0] if critic else torch.zeros(1), metrics


def test_a_gradient_longer_than_the_limit_is_shortened_to_it_in_its_direction(
    tiny, act, policy_batch, configure, build
):
    batch = policy_batch(tiny, act(tiny))

    def run(limit: float):
        config = configure(optim={"max_grad_norm": limit}, algorithm={"epochs": 1})
        gradient, _, metrics = gradients(build(copy.deepcopy(tiny), config), batch)
        return gradient, metrics["grad_norm"]

    whole, norm = run(1e9)
    assert norm == pytest.approx(float(whole.norm()), rel=1e-5) and norm > 0.1
    limit = norm / 7
    clipped, reported = run(limit)
    assert float(clipped.norm()) == pytest.approx(limit, rel=1e-4)
    assert reported == pytest.approx(norm, rel=1e-5), "the metric is of the gradient before it was clipped"
    cosine = float(clipped @ whole / (clipped.norm() * whole.norm()))
    assert cosine == pytest.approx(1.0, abs=1e-6)
    short, _ = run(norm * 1.5)
    assert torch.equal(short, whole), "one that is short enough stays"


def test_networks_apart_are_clipped_apart(tiny, act, learner_batch, configure, build):
    def run(limit: float):
        config = configure(optim={"max_grad_norm": limit}, algorithm=PPO, critic={"kind": "separate"})
        learner = build(copy.deepcopy(tiny), config)
        return gradients(learner, learner_batch(learner, act(tiny)))

    policy, critic, metrics = run(1e9)
    assert metrics["grad_norm"] == pytest.approx(float(policy.norm()), rel=1e-5)
    assert metrics["critic_grad_norm"] == pytest.approx(float(critic.norm()), rel=1e-5)
    limit = min(float(policy.norm()), float(critic.norm())) / 2
    clipped_policy, clipped_critic, _ = run(limit)
    assert float(clipped_policy.norm()) == pytest.approx(limit, rel=1e-4)
    assert float(clipped_critic.norm()) == pytest.approx(limit, rel=1e-4)


def test_betas_reach_the_optimizers_of_policy_and_critic(tiny, act, learner_batch, configure, build):
    """After one step the optimizer state is (1 - beta1) g and (1 - beta2) g squared."""
    betas = (0.7, 0.6)
    learner = build(tiny, configure(optim={"betas": betas}, algorithm=PPO))
    annotated_update(learner, learner_batch(learner, act(tiny)), 1)
    for optimizer in learner.optimizers():
        seen = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.grad.any():
                    continue
                state, gradient = optimizer.state[parameter], parameter.grad
                torch.testing.assert_close(state["exp_avg"], 0.3 * gradient, rtol=1e-5, atol=1e-12)
                torch.testing.assert_close(state["exp_avg_sq"], 0.4 * gradient**2, rtol=1e-5, atol=1e-15)
                seen += 1
        assert seen > 0


def test_the_default_betas(configure, build, tiny):
    assert all(group["betas"] == (0.9, 0.95) for group in build(tiny, configure()).optimizer.param_groups)
