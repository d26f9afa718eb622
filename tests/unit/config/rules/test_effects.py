"""Options without effect are refused by name, and only where the user gave them."""

import pytest

from vlarl.config.describe import options
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.problems import ConfigError
from vlarl.config.rules.effects_table import ALWAYS_FINETUNE, ALWAYS_TRAIN, FINETUNE, TRAIN
from vlarl.config.schema import Config
from vlarl.config.source.load import load_config, to_yaml
from vlarl.config.source.presets import presets_of

SCHEMAS = {"train": (Config, TRAIN, ALWAYS_TRAIN), "finetune": (FinetuneConfig, FINETUNE, ALWAYS_FINETUNE)}

BATCHED = {
    "env.suite": "gym",
    "gym.env": "mine:make",
    "gym.batched": True,
    "gym.instructions": ["go"],
    "policy.path": "builtin:tiny-oft",
}


def problems_of(source, overrides, schema=Config):
    """The problems of a configuration as lines; none if it is accepted."""
    try:
        load_config(source, overrides, schema=schema)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_option_is_classified(command):
    """A new option belongs into ALWAYS_TRAIN (or ALWAYS_FINETUNE), or needs a condition, in config/effects_table.py."""
    schema, table, always = SCHEMAS[command]
    known = options(schema)
    conditional = {path for path in known if any(condition.concerns(path) for condition in table)}
    assert set(known) - conditional - always == set(), "neither read always nor under a condition"
    assert conditional & always == set(), "both read always and under a condition"
    assert always <= set(known), "not options any more"
    for condition in table:
        assert any(condition.concerns(path) for path in known), f"about no option: {condition.options}"
        assert set(condition.switches) <= set(known), f"switched by no option: {condition.switches}"


SHAPES = {"env.suite": "prompts_shapes", "policy.path": "init:tiny-oft"}
OWN_PROMPTS = {"env.suite": "prompts", "prompts.path": ["t"], "policy.path": "init:tiny-oft"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lora.rank": 8}, "lora.rank = 8: has no effect without lora.enabled true"),
        ({"lora.target_modules": ["q_proj"]}, "without lora.enabled true"),
        ({"lora.adapter": "mine", "lora.rank": 8}, "with lora.adapter, whose rank"),
        ({"critic.lr": 1e-5}, "critic.lr = 1e-05: has no effect without algorithm.name ppo"),
        ({"algorithm.gae_lambda": 0.9}, "without algorithm.name ppo"),
        ({"algorithm.vf_coef": 1.0}, "without algorithm.name ppo"),
        ({"algorithm.cliprange_value": None}, "algorithm.cliprange_value = null: has no effect without algorithm.name"),
        ({"algorithm.critic_hidden": [64]}, "without algorithm.name ppo"),
        ({"algorithm.gamma": 0.9}, "by algorithm.verifier_gamma"),
        ({"algorithm.policy_drift_coef": 0.1}, "without algorithm.name cpgd"),
        ({"algorithm.importance_cap": 3.0}, "without algorithm.importance truncated"),
        ({"algorithm.aux_loss_coef": 0.01}, "on the models of robots, without a suite of prompts in env.suite"),
        ({"optim.packing": True}, "on the models of robots, without a suite of prompts in env.suite"),
        ({"optim.microbatch_tokens": 4096}, "on the models of robots, without a suite of prompts in env.suite"),
        (
            {**SHAPES, "optim.microbatch_tokens": 4096, "optim.microbatch_size": 4},
            "with optim.microbatch_tokens, which",
        ),
        ({"rollout.max_refills": 5}, "without rollout.refill true"),
        ({"curriculum.tau": 0.5}, "without curriculum.mode adaptive"),
        ({"curriculum.ema_alpha": 0.5}, "on which tasks are trained without curriculum.mode adaptive"),
        ({"prompts.match": "number"}, "prompts.match = 'number': has no effect without env.suite prompts"),
        ({**SHAPES, "prompts.system": "x"}, "without env.suite prompts"),
        ({**SHAPES, "env.image_size": 64}, "with prompts, which are one step with the images"),
        ({**OWN_PROMPTS, "prompts.eval_path": ["e"], "prompts.split_seed": 1}, "with prompts.eval_path"),
        ({"reward.pattern": "x"}, "without reward.source format"),
        ({"reward.max_tokens": 9}, "without reward.source overlong"),
        ({"kl.estimator": "k3"}, "without kl.coef above 0"),
        ({"kl.coef": 0.1, "kl.horizon": 5}, "without kl.target"),
        (
            {"checkpoint.best_return": False, "checkpoint.best_return_patience": 2},
            "without checkpoint.best_return true",
        ),
        ({"logging.wandb_project": "mine"}, "logging.wandb_project = 'mine': has no effect without logging.wandb true"),
        ({"vllm.max_num_seqs": 8}, "without vLLM engines"),
        ({"vllm.enforce_eager": True}, "without vLLM engines"),
        ({"distributed.worker_cpus": 0.5}, "without distributed.backend ray"),
        ({"distributed.colocate": True}, "without distributed.backend ray"),
        ({"distributed.max_staleness": 2, "distributed.backend": "ray"}, "without distributed.asynchronous true"),
        ({"distributed.reward_gpus": 0.5, "distributed.backend": "ray"}, "without distributed.num_reward_workers"),
        ({"env.render_gpu": 1}, "without a suite whose simulators render"),
        ({"env.exact_pixels": True}, "without a suite of MuJoCo"),
        ({"env.assets": "x"}, "without a suite of LIBERO"),
        ({"env.timeout_s": 5.0}, "with environments inside the trainer's process"),
        ({**BATCHED, "env.timeout_s": 5.0}, "with environments inside the trainer's process"),
        ({"env.retries": 5}, "with environments inside the trainer's process"),
        ({"policy.heads_device": "cpu"}, "without a critic"),
        ({"policy.base": "x"}, "without an adapter as policy.path"),
        ({"policy.path": "init:tiny-smolvla", "optim.cuda_graphs": False}, "on updates that are not recorded"),
        ({"policy.quantize": 4, "lora.enabled": True, "optim.cuda_graphs": False}, "on updates that are not recorded"),
        ({"reward.source": "rules", "reward.idle_tolerance": 0.1}, "without reward.idle_penalty above 0"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(overrides, words):
    (problem,) = problems_of(None, overrides)
    assert words in problem
    assert problem.split(" = ")[0] in overrides


@pytest.mark.parametrize("option", [{"policy.flow_noise": "cps"}, {"policy.train_backbone": True}])
@pytest.mark.parametrize("command", SCHEMAS)
def test_a_fresh_flow_policy_has_the_options_of_flow_policies(command, option):
    schema = SCHEMAS[command][0]
    if not option.keys() <= options(schema).keys():
        return
    source = None if schema is Config else "tabletop_base"
    assert problems_of(source, {"policy.path": "init:tiny-smolvla"} | option, schema) == []
    for other in ("init:tiny-oft", "builtin:tiny-oft"):
        (problem,) = problems_of(source, {"policy.path": other} | option, schema)
        assert "has no effect without a flow policy such as SmolVLA" in problem


def test_an_entropy_bonus_needs_a_std_that_is_learned():
    given = {"policy.path": "init:tiny-smolvla", "algorithm.entropy_coef": 0.01}
    for noise in ("sde", "cps"):
        (problem,) = problems_of(None, given | {"policy.flow_noise": noise})
        assert problem.startswith("algorithm.entropy_coef = 0.01: has no effect on a flow policy without")
    assert problems_of(None, given | {"policy.flow_noise": "noise"}) == []
    assert problems_of(None, given | {"policy.path": "init:tiny-oft"}) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"demos.hesitation": 0.5}, "without demonstrations in a simulator"),
        (
            {"demos.suites": ["metaworld_mt10"], "demos.close_high": 0.1},
            "without demonstrations of the tabletop or of LIBERO",
        ),
        ({"demos.path": "x", "demos.action_noise": 0.2}, "with demos.path"),
        ({"policy.center_crop": True}, "with fresh weights"),
        ({"lora.dropout": 0.1}, "without lora.enabled true"),
    ],
)
def test_so_it_is_for_finetune(overrides, words):
    (problem,) = problems_of("tabletop_base", overrides, FinetuneConfig)
    assert words in problem


@pytest.mark.parametrize(
    ("source", "overrides"),
    [
        ("vla_rl", {"lora.rank": 8}),
        (None, {"env.lockstep": True, "rollout.cuda_graphs": False, "run.device": "cpu"}),  # holds anyway
        (None, {"optim.cuda_graphs": False}),
        ("tabletop_ppo", {"critic.lr": 1e-5, "algorithm.gamma": 0.9, "policy.heads_device": "cpu"}),
        (None, {"kl.coef": 0.1, "kl.target": 0.01, "kl.horizon": 5}),
        (None, {"lora.rank": Config().lora.rank}),  # its default: as good as left out
        ("rl4vla", {"algorithm.name": "reinforce"}),  # critic.lr is the preset's
        ("tabletop_cluster", {"distributed.max_staleness": 2, "distributed.asynchronous": True}),
        (None, {"reward.source": "my_reward:f", "reward.timeout_s": 30.0}),
        (None, {"reward.source": len, "reward.timeout_s": 30.0}),
        (None, {"reward.source": "combined", "reward.sources": ["sparse", "my_reward:f"], "reward.timeout_s": 30.0}),
        ("tabletop_grpo", {**BATCHED, "env.retries": 5}),  # the collector runs a failed episode again
    ],
)
def test_what_has_an_effect_is_accepted(source, overrides):
    assert problems_of(source, overrides) == []


def test_a_file_of_ones_own_counts_with_its_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("optim:\n  lr: 1e-4\nlora:\n  rank: 8\n")
    (problem,) = problems_of(file, {})
    assert "lora.rank = 8" in problem
    assert "mine.yaml, line 4" in problem


@pytest.mark.parametrize("preset", presets_of(Config))
def test_a_saved_configuration_is_accepted(preset, tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(load_config(preset)))
    assert load_config(saved) == load_config(preset)


def test_a_saved_configuration_with_idle_values_is_accepted_and_a_flag_over_it_is_not(tmp_path):
    idle = Config().model_copy(update={"lora": Config().lora.model_copy(update={"rank": 8})})
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(idle))
    assert load_config(saved).lora.rank == 8
    (problem,) = problems_of(saved, ["--lora-rank", "16"])
    assert problem.startswith("lora.rank = 16 (--lora-rank): has no effect without lora.enabled true")


@pytest.mark.parametrize("options", [{}, {"lora.enabled": True}])
@pytest.mark.parametrize("option", [{"lora.rank": 8}, {"lora.alpha": 4}, {"lora.target_modules": ["q_proj"]}])
def test_an_adapter_keeps_its_own_rank_scale_and_layers(tmp_path, options, option):
    (tmp_path / "adapter_config.json").write_text('{"r": 32}')
    (problem,) = problems_of(None, {"policy.path": str(tmp_path), **options, **option})
    assert "has no effect if policy.path is an adapter, whose own rank, scale and layers are kept; leave" in problem


def test_only_the_switch_is_reported_if_it_is_wrong_itself():
    (problem,) = problems_of(None, ["--lora.enabled", "--lora.rank", "8", "--kl.coef", "much", "--kl.horizon", "5"])
    assert problem.startswith("kl.coef = 'much'")


def test_builtin_weights_act_in_another_suite_only_where_they_are_named(tmp_path):
    (problem,) = problems_of("tabletop_grpo", {"env.suite": "libero_spatial"})
    assert "policy.path = 'builtin:tiny-openvla' with env.suite = 'libero_spatial'" in problem
    assert "libero_spatial_grpo_oft" in problem
    assert "--policy.path builtin:tiny-openvla" in problem
    named = {"env.suite": "libero_spatial", "policy.path": "builtin:tiny-openvla"}
    assert problems_of("tabletop_grpo", named) == []
    file = tmp_path / "mine.yaml"
    file.write_text("env: {suite: metaworld_mt10}\npolicy: {path: builtin:tiny-oft}\n")
    assert problems_of(file, {}) == []
    file.write_text("env: {suite: metaworld_mt10}\n")
    assert "not for metaworld_mt10" in problems_of(file, {})[0]


def test_a_configuration_in_python_names_its_weights():
    named = {"env.suite": "libero_spatial", "policy.path": "builtin:tiny-oft"}
    config = load_config("tabletop_grpo", named)
    assert problems_of(config, {}) == problems_of(config, {"run.seed": 1}) == []
    (problem,) = problems_of(load_config("tabletop_grpo"), {"env.suite": "libero_spatial"})
    assert "not for libero_spatial" in problem
