"""The learner with real tiny models: ratios, gradients, refusals, warm-ups."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes.decisions import annotated, annotated_update
from fakes.float_error import EPS, LOGPROB_FACTOR, check_gradients, in_float64, logprob_judge, value_judge

from vlarl.observability.metrics import WeightedMeans
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.training.annotate import last_observations, values_by_trajectory
from vlarl.training.batch import build_batch
from vlarl.training.learner import Learner

PPO = {"name": "ppo", "critic_hidden": (16,)}


def weights(policy: OpenVLAPolicy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def changed(policy: OpenVLAPolicy, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
def test_the_ratio_is_one_on_the_first_minibatch(policy, act, policy_batch, configure, temperature, sharpness, build):
    """Also for a policy that is sure of itself, whose logits are ten times larger."""
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.mul_(sharpness)
    config = configure(rollout={"temperature": temperature}, optim={"lr": 1e-3, "microbatch_size": 4})
    batch = policy_batch(policy, act(policy, temperature))
    assert not batch.inputs.attention_mask.all(), "prompts must be ragged"
    allowed = logprob_judge(policy, batch.inputs, batch.decisions.sample.ids, temperature).apart(LOGPROB_FACTOR)
    result = annotated_update(build(policy, config), batch, 1)
    assert result.metrics["ratio_first_minibatch_error"] == 0.0
    gap = result.metrics["engine_logprob_error"]
    assert gap <= allowed
    assert abs(result.metrics["engine_mismatch_kl"]) <= gap**2 / 2 + EPS * gap  # the k3 of the largest gap
    assert result.metrics["ratio_max"] > 1 + 1e-4, "the second epoch has moved"


def test_each_decision_is_scored_once_before_the_first_step_however_few_there_are(act, policy_batch, configure, build):
    """With fewer rows than minibatches, the second epoch is not part of the first."""
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    learner = build(policy, configure(optim={"minibatches": 8}, algorithm={"epochs": 2}))
    batch = policy_batch(policy, act(policy, lengths=(2,)))
    evaluate, seen = policy.evaluate, []

    def counted(inputs, decisions, temperature, **options):
        seen.append((len(decisions), torch.is_grad_enabled()))
        return evaluate(inputs, decisions, temperature, **options)

    policy.evaluate = counted
    annotated_update(learner, batch, 1)
    assert sum(rows for rows, with_gradient in seen if not with_gradient) == len(batch) == 2
    assert sum(rows for rows, with_gradient in seen if with_gradient) == 4, "two epochs"


def test_a_rank_reads_the_rows_of_its_own_microbatches_in_all_epochs(act, policy_batch, configure, build):
    """One microbatch a minibatch, so that rank 0 has all of them and rank 1 none; of two each, both have half."""
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    batch = policy_batch(policy, act(policy, lengths=(4, 4)))
    whole = build(policy, configure(optim={"minibatches": 2, "microbatch_size": 4}, algorithm={"epochs": 3}))
    halves = build(policy, configure(optim={"minibatches": 2, "microbatch_size": 2}, algorithm={"epochs": 1}))
    found = {}
    for rank in range(2):
        whole.ranks = halves.ranks = SimpleNamespace(rank=rank, world_size=2)
        found[rank] = whole.own_rows(batch, 1).tolist(), halves.own_rows(batch, 1).tolist()
    assert sorted(found[0][0]) == sorted(list(range(8)) * 3) and found[1][0] == []
    assert len(found[0][1]) == len(found[1][1]) == 4
    assert sorted(found[0][1] + found[1][1]) == list(range(8))


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_the_engines_own_logprobs_start_the_ratio_near_one(policy, act, policy_batch, configure, temperature, build):
    config = configure(rollout={"temperature": temperature}, algorithm={"old_logprobs": "engine"})
    batch = policy_batch(policy, act(policy, temperature))
    allowed = logprob_judge(policy, batch.inputs, batch.decisions.sample.ids, temperature).apart(LOGPROB_FACTOR)
    result = annotated_update(build(policy, config), batch, 1)
    assert result.metrics["ratio_first_minibatch_error"] <= allowed + EPS


def test_another_temperature_in_the_learner_would_show(policy, act, policy_batch, configure, build):
    batch = policy_batch(policy, act(policy, temperature=1.6))
    start = copy.deepcopy(policy)
    config = configure(rollout={"temperature": 1.0}, algorithm={"old_logprobs": "engine"})
    assert annotated_update(build(policy, config), batch, 1).metrics["ratio_first_minibatch_error"] > 1e-3
    again = annotated_update(build(start, configure(rollout={"temperature": 1.0})), batch, 1)
    assert again.metrics["engine_logprob_error"] > 1e-3


WIDE = {"clip_low": 0.2, "clip_high": 0.28}  # GSPO's own range would clip most of what has strayed
LOSSES = {
    "grpo": {"name": "grpo"},
    "sequence mean": {"name": "grpo", "aggregate": "sequence_mean", "entropy_coef": 0.1},
    "ratio of actions": {"name": "grpo", "ratio_level": "action"},
    "ratio of chunks": {"name": "grpo", "ratio_level": "chunk", "aggregate": "sequence_mean"},
    "gspo": {"name": "grpo", "ratio_level": "sequence", "aggregate": "sequence_mean"} | WIDE,
    "ratio of episodes": {"name": "grpo", "ratio_level": "sequence"} | WIDE,
    "ppo": PPO,
    "ppo, steps": PPO | {"gae_level": "step", "aggregate": "sequence_mean"},
    "ppo, tokens": PPO | {"gae_level": "token"},
}


@pytest.mark.parametrize(("loss", "critic"), [*((loss, "head") for loss in LOSSES), ("ppo, tokens", "separate")])
def test_microbatches_add_up_to_the_gradient_of_the_whole(policy, act, learner_batch, configure, build, loss, critic):
    def built(size: int) -> Learner:
        config = configure(
            algorithm=LOSSES[loss],
            critic={"kind": critic},
            optim={"microbatch_size": size, "sort_by_length": size == 4},
        )
        return build(copy.deepcopy(policy), config)

    acting = built(100)
    batch = learner_batch(acting, act(acting.policy))
    assert len(set(batch.mask.sum(dim=1).tolist())) == (2 if policy.chunk_length > 1 else 1)
    rows = torch.tensor([0, 1, 5, 4, 3, 2])
    strayed = 0.02 * torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, old_logprobs=batch.decisions.engine_logprobs - strayed)

    def gradients(size: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        learner = built(size)
        for network in learner._networks():
            network.to(dtype)
        for _ in range(2 if size == 4 else 1):  # twice would double the gradient if the first one's were kept
            with in_float64() if dtype == torch.float64 else nullcontext():
                learner._accumulate(learner._minibatch(batch, rows, moved=True), rows, True, False)
        trained = enumerate(learner.named_trained())
        return {f"{number} {name}": p.grad for number, (name, p, _) in trained if p.grad is not None}

    exact, plain = gradients(100, torch.float64), gradients(100)
    assert sum(float(gradient.square().sum()) for gradient in exact.values()) > 0.01
    for size in (4, 1):
        check_gradients(gradients(size), exact, plain)


def test_tokens_past_the_end_do_not_move_the_weights(act, policy_batch, configure, build):
    from vlarl.policies.tiny import init_tiny

    outcomes = []
    for garbage in (None, float("nan")):
        policy = init_tiny("parallel", seed=3)
        batch = policy_batch(policy, act(policy))
        if garbage is not None:
            dirty = batch.decisions.engine_logprobs.masked_fill(~batch.mask, garbage)
            batch = replace(batch, decisions=replace(batch.decisions, engine_logprobs=dirty))
        result = annotated_update(build(policy, configure(optim={"lr": 1e-3})), batch, 1)
        outcomes.append((weights(policy), result.metrics))
    assert not batch.mask.all()
    (clean, clean_metrics), (dirty, dirty_metrics) = outcomes
    assert clean_metrics == dirty_metrics
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_a_gradient_that_is_not_finite_is_refused_and_counted(policy, act, policy_batch, configure, build):
    batch = policy_batch(policy, act(policy))
    broken = replace(batch, advantages=batch.advantages.masked_fill(batch.mask, float("nan")))
    learner, before = build(policy, configure(optim={"lr": 1e-3})), weights(policy)
    result = annotated_update(learner, broken, 1)
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (0, 2)
    assert changed(policy, before) == set()
    assert not learner.optimizer.state
    healthy = annotated_update(learner, batch, 2)
    assert (healthy.num_optimizer_steps, healthy.num_skipped_steps) == (2, 0)
    assert changed(policy, before)


def test_one_broken_minibatch_does_not_stop_the_others(act, policy_batch, configure, build):
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    batch = policy_batch(policy, act(policy))
    advantages = batch.advantages.clone()
    advantages[0] = float("inf")
    learner = build(policy, configure(optim={"minibatches": 2}, algorithm={"epochs": 1}))
    seen = []
    result = annotated_update(
        learner, replace(batch, advantages=advantages), 1, lambda done, of: seen.append((done, of))
    )
    assert (result.num_optimizer_steps, result.num_skipped_steps) == (1, 1)
    assert seen == [(1, 2), (2, 2)]
    assert all(p.isfinite().all() for p in policy.parameters())


def test_the_kl_limit_stops_before_the_step(policy, act, policy_batch, configure, build):
    batch = policy_batch(policy, act(policy))
    off = batch.decisions.engine_logprobs - 0.5  # k3 = e^0.5 - 1 - 0.5 = 0.1487
    strayed = replace(batch, decisions=replace(batch.decisions, engine_logprobs=off))
    before = weights(policy)
    stopped = annotated_update(
        build(policy, configure(algorithm={"max_approx_kl": 0.148, "old_logprobs": "engine"})), strayed, 1
    )
    assert stopped.stopped_early and stopped.num_optimizer_steps == 0 == stopped.num_skipped_steps
    assert changed(policy, before) == set()
    assert stopped.metrics["approx_kl"] == pytest.approx(0.14872, abs=1e-4)
    lenient = configure(algorithm={"max_approx_kl": 0.15, "epochs": 1, "old_logprobs": "engine"})
    going = annotated_update(build(policy, lenient), strayed, 1)
    assert not going.stopped_early and going.num_optimizer_steps == 1
    assert changed(policy, before)


def test_a_schedule_follows_the_iterations_that_the_environment_steps_make(policy, act, policy_batch, configure, build):
    config = configure(optim={"lr": 1e-3, "schedule": "linear"}, run={"iterations": None, "total_env_steps": 1_000_000})
    learner, batch = build(policy, config), policy_batch(policy, act(policy))
    rates = [
        annotated_update(learner, batch, n, iterations=iterations).metrics["lr"]
        for n, iterations in ((1, 4), (2, 4), (3, 8))
    ]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.75e-3])  # episodes became shorter, and the run longer


def test_critic_warm_up_moves_neither_the_policy_nor_its_schedule(policy, act, policy_batch, configure, build):
    config = configure(
        algorithm=PPO | {"value_init_steps": 2},
        optim={"lr": 1e-3, "schedule": "linear", "weight_decay": 0.1},
        critic={"lr": 1e-2},
        run={"iterations": 4},
    )
    learner, start = build(policy, config), None
    batch = policy_batch(policy, act(policy))
    start = weights(policy)
    for iteration in (1, 2):
        result = annotated_update(learner, batch, iteration)
        moved = changed(policy, start)
        assert moved and all(name.startswith("value_head.") for name in moved)
        assert result.metrics["lr"] == 0.0 and learner.policy_updates == 0
        assert not learner.optimizer.state
    trained = annotated_update(learner, batch, 3)
    assert trained.metrics["lr"] == pytest.approx(1e-3)  # the schedule begins here
    assert any(name.startswith("model.") for name in changed(policy, start))
    assert annotated_update(learner, batch, 4).metrics["lr"] == pytest.approx(0.5e-3)  # over the two that remain
    assert learner.version == 4


def test_with_learning_rate_zero_every_weight_stays(policy, act, policy_batch, configure, build):
    config = configure(algorithm=PPO, optim={"lr": 0.0, "weight_decay": 0.5}, critic={"lr": 0.0})
    learner = build(policy, config)
    before = weights(policy)
    result = annotated_update(learner, policy_batch(policy, act(policy)), 1)
    assert result.num_optimizer_steps == 2 and changed(policy, before) == set()
    assert result.metrics["grad_norm"] > 0


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(policy, act, policy_batch, configure, build):
    batch = policy_batch(policy, act(policy))
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])[:, None]
    batch = replace(batch, advantages=sign.expand(batch.advantages.shape).contiguous())
    annotated_update(build(policy, configure(optim={"lr": 3e-4}, algorithm={"epochs": 4})), batch, 1)
    from vlarl.policies.distribution import token_logprobs

    with torch.no_grad():
        ids = batch.decisions.sample.ids
        now = token_logprobs(policy.score(batch.inputs, ids).logits, ids - policy.codec.first_id, 1.0)
    gain = torch.where(batch.mask, now - batch.decisions.engine_logprobs, 0.0).sum(dim=1)
    assert (gain * sign[:, 0] > 0).all()


def test_updates_are_repeatable_and_shuffle_in_each_iteration(act, policy_batch, configure, build):
    from vlarl.policies.tiny import init_tiny

    def after(iteration: int) -> torch.Tensor:
        policy = init_tiny("parallel", seed=3)
        config = configure(optim={"minibatches": 3, "lr": 1e-3}, algorithm={"epochs": 1})
        annotated_update(build(policy, config), policy_batch(policy, act(policy)), iteration)
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    assert torch.equal(after(1), after(1))
    assert not torch.equal(after(1), after(2))


def test_values_come_in_the_order_of_trajectories_with_the_last_observation(policy, act, configure, build):
    learner = build(policy, configure(algorithm=PPO, optim={"microbatch_size": 4}))
    torch.nn.init.normal_(policy.value_head.out.weight)
    episodes = act(policy)
    batch, cut_off = build_batch(episodes), last_observations(episodes)
    assert cut_off == [0, 2], "the second one terminated: nothing follows it"
    found = learner.annotate(batch, 1, policy.process([episodes[index].final_observation for index in cut_off]))
    values = values_by_trajectory(found.onto(batch, learner.config), episodes, found.last_values)
    assert [len(v) for v in values] == [3, 4, 2]
    for episode, value in zip(episodes, values, strict=True):
        seen = [t.observation for t in episode.transitions] + [episode.final_observation]
        for observed, one in zip(seen[:-1] if episode.terminated else seen, value, strict=not episode.terminated):
            value_judge(policy, policy.process([observed])).check(torch.from_numpy(one)[None])
        assert not episode.terminated or value[-1].tolist() == [0.0]


def test_frozen_vision_stays(policy, act, policy_batch, configure, build):
    policy.freeze("vision")
    before = weights(policy)
    annotated_update(
        build(policy, configure(optim={"lr": 1e-3, "weight_decay": 0.1})), policy_batch(policy, act(policy)), 1
    )
    moved = changed(policy, before)
    assert moved and not any("vision_backbone" in name for name in moved)


# What the loss must know of a whole minibatch


@pytest.mark.parametrize(
    "algorithm", [{"aggregate": "sequence_mean"}, {"ratio_level": "sequence"}], ids=["sequence_mean", "sequence"]
)
def test_minibatches_are_of_whole_trajectories_where_the_loss_needs_it(act, policy_batch, configure, build, algorithm):
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    batch = policy_batch(policy, act(policy, lengths=(2, 3, 1, 2)))

    def split(**options) -> list[set[int]]:
        learner = build(policy, configure(algorithm=options | {"epochs": 2}, optim={"minibatches": 2}))
        return [set(batch.trajectory[rows].tolist()) for rows in learner._schedule(batch, 1)]

    for first, second in zip(split(**algorithm)[::2], split(**algorithm)[1::2], strict=True):
        assert len(first) == len(second) == 2 and first | second == {0, 1, 2, 3}
    assert any(len(members) > 2 for members in split()), "rows are assigned one by one otherwise"


def test_the_ratio_of_a_trajectory_is_that_of_all_its_executed_tokens(policy, act, policy_batch, configure, build):
    config = configure(algorithm={"ratio_level": "sequence", "epochs": 1}, optim={"microbatch_size": 2, "lr": 1e-3})
    learner = build(policy, config)
    batch, rows = policy_batch(policy, act(policy)), torch.arange(6)
    shift = torch.tensor([0.1, 0.1, -0.2, -0.2, -0.2, 0.3])[:, None]  # by trajectory
    strayed = replace(
        batch, old_logprobs=torch.where(batch.mask, batch.decisions.engine_logprobs - shift, float("nan"))
    )
    ratios = learner._minibatch(strayed, rows, moved=True).sequence_log_ratio
    torch.testing.assert_close(ratios, shift[:, 0], atol=1e-5, rtol=1e-4)
    assert learner._minibatch(strayed, rows, moved=False).sequence_log_ratio.tolist() == [0.0] * 6
    result = annotated_update(learner, batch, 1)
    assert result.metrics["ratio_first_minibatch_error"] == 0.0


def test_passes_for_the_ratio_of_a_trajectory_begin_once_the_policy_has_moved(act, policy_batch, configure, build):
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    passes = []
    evaluate = policy.evaluate

    def counted(inputs, decisions, temperature, **options):
        passes.append(torch.is_grad_enabled())
        return evaluate(inputs, decisions, temperature, **options)

    batch = policy_batch(policy, act(policy))
    policy.evaluate = counted
    config = configure(algorithm={"ratio_level": "sequence", "epochs": 2}, optim={"lr": 1e-3})
    annotated_update(build(policy, config), batch, 1)
    assert passes == [False, True, False, True]  # old log-probs, first step; ratio, second step


def test_only_the_least_certain_tokens_are_trained_on(act, policy_batch, configure, build):
    from vlarl.policies.distribution import token_entropy
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.mul_(10)  # entropies apart
    batch = policy_batch(policy, act(policy))
    learner = build(policy, configure(algorithm={"entropy_top_fraction": 0.25}))
    prepared = learner._corrected(annotated(learner, batch, 1), WeightedMeans())
    with torch.no_grad():
        entropy = token_entropy(policy.score(batch.inputs, batch.decisions.sample.ids).logits, 1.0)
    trained = prepared.advantages != 0
    assert not (trained & ~batch.mask).any()
    assert int(trained.sum()) == -(-int(batch.mask.sum()) // 4)
    assert entropy[trained].min() > entropy[batch.mask & ~trained].max()
    assert torch.equal(prepared.advantages[trained], batch.advantages[trained])


def test_a_sorted_minibatch_still_starts_at_a_ratio_of_one(policy, act, policy_batch, configure, build):
    config = configure(optim={"lr": 1e-3, "microbatch_size": 2, "minibatches": 2, "sort_by_length": True})
    result = annotated_update(build(policy, config), policy_batch(policy, act(policy)), 1)
    assert result.metrics["ratio_first_minibatch_error"] == 0.0


def test_explained_variance_looks_at_executed_steps(act, learner_batch, configure, build):
    from vlarl.policies.tiny import init_tiny

    policy = init_tiny("parallel", seed=3)
    learner = build(policy, configure(algorithm=PPO | {"gae_level": "step"}))
    batch = learner_batch(learner, act(policy))
    perfect = replace(batch, old_values=torch.where(batch.value_mask, batch.returns, 99.0))
    assert annotated_update(learner, perfect, 1).metrics["explained_variance"] == pytest.approx(1.0)


def test_the_schedule_counts_updates_and_not_rollouts(policy, configure, build):
    config = configure(optim={"lr": 1.0, "schedule": "linear", "rollouts_per_update": 3}, run={"iterations": 6})
    learner = build(policy, config)
    assert learner._set_learning_rates(True, 6) == 1.0
    learner.policy_updates = 1
    assert learner._set_learning_rates(True, 6) == pytest.approx(0.5)  # two updates in all


def test_adapters_on_a_rounded_base_move_within_an_update(tmp_path, act, policy_batch, configure, build):
    """Whatever they compute with must follow each step, not each update."""
    from vlarl.config.schema import LoraConfig, PolicyConfig
    from vlarl.policies.load import load_policy
    from vlarl.policies.tiny import init_tiny

    init_tiny("parallel", seed=3).save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", dtype="bfloat16")
    policy.prepare_training(PolicyConfig(dtype="bfloat16"), LoraConfig(enabled=True, rank=8), seed=1)
    config = configure(optim={"lr": 1e-2}, algorithm={"epochs": 3})
    result = annotated_update(build(policy, config), policy_batch(policy, act(policy)), 1)
    assert result.metrics["ratio_max"] > 1.01 and result.metrics["approx_kl"] > 0
