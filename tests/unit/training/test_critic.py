"""Critics: a head or a separate network; what each shares with the policy, trains and leaves frozen."""

import logging
from dataclasses import replace

import pytest
import torch
from fakes.decisions import annotated_update
from fakes.float_error import logit_judge

from vlarl.config.schema import LoraConfig, PolicyConfig
from vlarl.policies.load import load_policy
from vlarl.policies.tiny import init_tiny
from vlarl.training.annotate import last_observations, values_by_trajectory
from vlarl.training.batch import build_batch
from vlarl.training.swap import trained_weights

PPO = {"name": "ppo", "critic_hidden": (16,), "epochs": 1}


def snapshot(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def changed(module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}


@pytest.fixture
def adapted(tmp_path):
    """A policy with fresh adapters."""
    init_tiny("parallel", seed=3).save(tmp_path / "base")
    policy = load_policy(tmp_path / "base")
    policy.prepare_training(PolicyConfig(), LoraConfig(enabled=True, rank=4), seed=1)
    return policy


@pytest.mark.parametrize("kind", ["head", "separate"])
@pytest.mark.parametrize(("level", "count"), [("chunk", 1), ("step", 4), ("token", 28)])
def test_values_come_as_the_level_wants_them(act, learner_batch, configure, build, kind, level, count):
    policy = init_tiny("parallel", seed=3)
    learner = build(policy, configure(algorithm=PPO | {"gae_level": level}, critic={"kind": kind}))
    episodes = act(policy)
    batch, cut_off = build_batch(episodes), last_observations(episodes)
    found = learner.annotate(batch, 1, policy.process([episodes[index].final_observation for index in cut_off]))
    values = values_by_trajectory(found.onto(batch, learner.config), episodes, found.last_values)
    assert [v.shape for v in values] == [(3, count), (4, count), (2, count)]
    result = annotated_update(learner, learner_batch(learner, episodes), 1)
    assert result.num_optimizer_steps == 1 and result.metrics["value_loss"] > 0


def test_a_critic_of_another_level_is_replaced_and_said_to_be(tmp_path, configure, build, caplog):
    policy = init_tiny("parallel", seed=3)
    policy.attach_value_head((8,), seed=1)  # one value, as all critics used to have
    policy.save(tmp_path / "old")
    kept = load_policy(tmp_path / "old")
    build(kept, configure(algorithm=PPO))
    assert torch.equal(kept.value_head.layers[0].weight, policy.value_head.layers[0].weight)
    assert not caplog.records
    stepwise = load_policy(tmp_path / "old")
    with caplog.at_level(logging.WARNING):
        build(stepwise, configure(algorithm=PPO | {"gae_level": "step"}))
    assert stepwise.value_head.num_values == 4 and stepwise.value_head.hidden_sizes == (16,)
    assert "gives 1 values a decision, not 4: a new one" in caplog.text
    stepwise.save(tmp_path / "new")
    assert load_policy(tmp_path / "new").value_head.num_values == 4


def test_value_loss_counts_executed_steps_alone(act, learner_batch, configure, build):
    """Targets of steps that never ran may be anything."""
    outcomes = []
    for garbage in (0.0, 1e6):
        policy = init_tiny("parallel", seed=3)
        learner = build(policy, configure(algorithm=PPO | {"gae_level": "step"}, critic={"lr": 1e-2}))
        batch = learner_batch(learner, act(policy))
        assert not batch.value_mask.all()
        batch = replace(batch, returns=batch.returns.masked_fill(~batch.value_mask, garbage))
        metrics = annotated_update(learner, batch, 1).metrics
        outcomes.append((metrics["value_loss"], metrics["explained_variance"], snapshot(policy)))
    assert outcomes[0][:2] == outcomes[1][:2]
    assert all(torch.equal(outcomes[0][2][name], outcomes[1][2][name]) for name in outcomes[0][2])


def test_a_warm_up_of_the_head_sends_nothing_through_the_trunk(policy, act, learner_batch, configure, build):
    learner = build(policy, configure(algorithm=PPO | {"value_init_steps": 1}, critic={"lr": 1e-2}))
    reached = []
    for parameter in trained_weights(policy).values():
        parameter.register_hook(lambda gradient: reached.append(1))
    before, batch = snapshot(policy), learner_batch(learner, act(policy))
    annotated_update(learner, batch, 1)
    assert not reached and all(p.grad is None for p in trained_weights(policy).values())
    assert changed(policy, before) and all(name.startswith("value_head.") for name in changed(policy, before))
    annotated_update(learner, batch, 2)
    assert reached, "afterwards the value loss reaches the trunk again"


def test_a_frozen_base_is_shared_and_adapters_are_not(adapted, act, learner_batch, configure, build):
    learner = build(adapted, configure(algorithm=PPO, critic={"kind": "separate", "lr": 1e-3}, optim={"lr": 1e-3}))
    critic, own = learner.critic, dict(adapted.named_parameters())
    for name, parameter in critic.named_parameters():
        if name.startswith("value_head."):
            assert adapted.value_head is None
        elif ".lora_" in name:
            assert parameter.data_ptr() != own[name].data_ptr() and parameter.requires_grad
            assert "lora_A" in name or not parameter.any(), "fresh adapters change nothing yet"
        else:
            assert parameter is own[name]
    assert any(not torch.equal(p, own[n]) for n, p in critic.named_parameters() if "lora_A" in n)
    policy_before, critic_before = snapshot(adapted), snapshot(critic)
    annotated_update(learner, learner_batch(learner, act(adapted)), 1)
    assert changed(adapted, policy_before) and all(".lora_" in name for name in changed(adapted, policy_before))
    moved = changed(critic, critic_before)
    assert any(".lora_" in name for name in moved) and any(name.startswith("value_head.") for name in moved)
    assert all(".lora_" in name or name.startswith("value_head.") for name in moved)


def test_adapters_that_were_trained_before_are_not_in_the_critic(adapted, observation, configure, build):
    plain = adapted.process([observation(0)])
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    learner = build(adapted, configure(algorithm=PPO, critic={"kind": "separate"}))
    ids, _ = adapted.decode(plain, lambda logits, _: logits.argmax(dim=2))
    with adapted.without_adapters():
        judge = logit_judge(adapted, plain, ids)
    judge.check(learner.critic.score(plain, ids).logits)


def test_fully_trained_networks_share_nothing_that_is_trained(policy, act, learner_batch, configure, build):
    policy.freeze("vision")
    config = configure(
        algorithm=PPO | {"value_init_steps": 1}, critic={"kind": "separate", "lr": 1e-3}, optim={"lr": 1e-3}
    )
    learner = build(policy, config)
    own = dict(policy.named_parameters())
    shared = {name for name, p in learner.critic.named_parameters() if name in own and p is own[name]}
    assert shared and all("vision_backbone" in name for name in shared)
    batch, policy_before, critic_before = (
        learner_batch(learner, act(policy)),
        snapshot(policy),
        snapshot(learner.critic),
    )
    annotated_update(learner, batch, 1)
    assert changed(policy, policy_before) == set() and not learner.optimizer.state
    assert all(p.grad is None for p in policy.parameters())
    moved = changed(learner.critic, critic_before)
    assert any(name.startswith("model.") for name in moved) and not any("vision_backbone" in name for name in moved)
    annotated_update(learner, batch, 2)
    assert any(name.startswith("model.") for name in changed(policy, policy_before))


def test_the_critic_has_a_learning_rate_schedule_and_warm_up_of_its_own(policy, act, learner_batch, configure, build):
    config = configure(
        run={"iterations": 6},
        algorithm=PPO | {"value_init_steps": 2},
        optim={"lr": 1.0, "schedule": "constant"},
        critic={"kind": "separate", "lr": 0.5, "schedule": "linear", "warmup_iterations": 2},
    )
    learner = build(policy, config)
    seen = []
    for updates in range(6):
        learner.version, learner.policy_updates = updates, max(updates - 2, 0)
        learner._set_learning_rates(updates >= 2, 6)
        seen.append((learner.optimizer.param_groups[0]["lr"], learner.critic_optimizer.param_groups[0]["lr"]))
    assert [lr for lr, _ in seen] == [1.0] * 6
    assert [lr for _, lr in seen] == pytest.approx([0.5 / 3, 1 / 3, 0.5, 0.375, 0.25, 0.125])


def test_by_default_the_critic_follows_the_policys_schedule(policy, configure, build):
    config = configure(algorithm=PPO, optim={"schedule": "linear"}, critic={"lr": 0.5}, run={"iterations": 4})
    learner = build(policy, config)
    learner.version = learner.policy_updates = 1
    learner._set_learning_rates(True, 4)
    assert learner.critic_optimizer.param_groups[0]["lr"] == pytest.approx(0.375)


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_broken_gradient_of_either_network_stops_both(policy, act, learner_batch, configure, build, broken):
    learner = build(policy, configure(algorithm=PPO, critic={"kind": "separate"}, optim={"lr": 1e-3}))
    batch = learner_batch(learner, act(policy))
    column = "advantages" if broken == "policy" else "returns"
    bad = replace(batch, **{column: getattr(batch, column) * float("nan")})
    policy_before, critic_before = snapshot(policy), snapshot(learner.critic)
    result = annotated_update(learner, bad, 1)
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (0, 1)
    assert changed(policy, policy_before) == set() == changed(learner.critic, critic_before)
    good = annotated_update(learner, batch, 2)
    assert good.num_optimizer_steps == 1
    assert good.metrics["grad_norm"] > 0 and good.metrics["critic_grad_norm"] > 0


def test_a_separate_critic_learns_its_targets(act, learner_batch, configure, build):
    policy = init_tiny("parallel", seed=3)
    config = configure(
        run={"iterations": 100},
        algorithm=PPO | {"value_init_steps": 99, "cliprange_value": None},
        critic={"kind": "separate", "lr": 1e-3},
    )
    learner = build(policy, config)
    batch = learner_batch(learner, act(policy))
    losses = [annotated_update(learner, batch, n).metrics["value_loss"] for n in range(1, 13)]
    assert losses[-1] < 0.1 * losses[0]
