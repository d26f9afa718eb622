"""Files, flags, strictness, and the exact words of the messages."""

from pathlib import Path

import pytest

from vlarl.config import Config, ConfigError, FinetuneConfig, load_config, to_yaml
from vlarl.config.flags import ALIASES
from vlarl.config.known import KNOWN_SUITES
from vlarl.errors import UsageError


def problems(source=None, overrides=(), schema=Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, schema=schema)
    return [str(problem) for problem in caught.value.problems]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_flags_go_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = write(tmp_path, "optim:\n  lr: 1e-5\n  weight_decay: 1\nrollout:\n")
    config = load_config(path, ["--optim.lr", "3e-6"])
    assert config.optim.lr == 3e-6
    assert config.optim.weight_decay == 1.0
    assert config.optim.betas == Config().optim.betas
    assert config.rollout == Config().rollout


def test_a_part_of_a_section_keeps_the_schemas_own_default_for_the_rest(tmp_path):
    path = write(tmp_path, "policy:\n  chunk_length: 8\ndemos:\n  episodes_per_task: 3\n")
    assert load_config(path, schema=FinetuneConfig).policy.path == FinetuneConfig().policy.path == "init:tiny-oft"


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("1.5e+2", 150.0), ("2", 2.0), (".5", 0.5), ("3.", 3.0), ("1e1", 10.0)],
)
def test_numbers_are_read_as_people_write_them(tmp_path, text, number):
    assert load_config(write(tmp_path, f"optim:\n  lr: {text}\n")).optim.lr == number
    assert load_config(overrides=["--optim.lr", text]).optim.lr == number


def test_whole_numbers_with_an_exponent_are_integers():
    assert load_config(overrides=["--timesteps", "1e6"]).run.total_env_steps == 1_000_000


def test_text_options_take_any_text_from_a_flag():
    config = load_config(
        overrides=["--run.name", "12", "--logging.wandb_group", "no", "--logging.wandb_entity", "null"]
    )
    assert (config.run.name, config.logging.wandb_group, config.logging.wandb_entity) == ("12", "no", None)


@pytest.mark.parametrize(
    "flags",
    [
        ["--env.task_ids", "0", "1", "2"],
        ["--env.task_ids", "[0, 1, 2]"],
        ["--env.task_ids=0,1,2"],
        ["--env.task-ids", "0,1", "2", "--run.seed", "1"],
        ["--task-ids", "0", "1", "2"],
    ],
)
def test_lists(flags):
    assert load_config(overrides=flags).env.task_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--logging.wandb"], True),
        (["--logging.wandb", "false"], False),
        (["--logging.wandb=true"], True),
        (["--logging.wandb", "--no-logging.wandb"], False),
        (["--use-wandb"], True),
        (["--no-use-wandb"], False),
    ],
)
def test_switches(flags, value):
    assert load_config(overrides=flags).logging.wandb is value


def test_every_alias_sets_its_option():
    flags = ["--task-suite", "tabletop_goal", "--task-ids", "4", "--num-envs", "5", "--timesteps", "600", "--use-wandb"]
    flags += ["--seed", "8", "--name", "x"]
    config = load_config("tabletop_ppo", [*flags, "--value-init-steps", "1"])
    assert (config.env.suite, config.env.task_ids, config.env.num_envs) == ("tabletop_goal", (4,), 5)
    assert (config.run.total_env_steps, config.run.seed, config.run.name) == (600, 8, "x")
    assert config.logging.wandb and config.algorithm.value_init_steps == 1
    assert load_config(overrides=["--task-id", "4"]).env.task_ids == (4,)
    flags = ["--vla-path", "org/model", "--unnorm-key", "bridge", "--use-proprio", "--num-images-in-input", "2"]
    flags += ["--use-lora", "--lora-rank", "8", "--lora-alpha", "4", "--lora-dropout", "0.0"]
    flags += ["--lora-target-modules", "q_proj", "v_proj", "--enable-gradient-checkpointing"]
    config = load_config(overrides=flags)
    policy, lora = config.policy, config.lora
    assert (policy.path, policy.unnorm_key, policy.use_proprio, policy.num_images) == ("org/model", "bridge", True, 2)
    assert (lora.enabled, lora.rank, lora.alpha, lora.dropout) == (True, 8, 4, 0.0)
    assert lora.target_modules == ("q_proj", "v_proj") and policy.gradient_checkpointing
    config = load_config(overrides=["--pretrained-checkpoint", "a", "--load-adapter-checkpoint", "b"])
    assert (config.policy.path, config.lora.adapter) == ("a", "b")
    assert load_config(overrides=["--model", "tiny"]).policy.path == "init:tiny-oft"
    assert load_config(overrides=["--model", "org/model"]).policy.path == "org/model"
    flags = ["--advantage-estimator", "cpgd", "--max-epochs", "5"]
    flags += ["--clip-ratio-low", "0.1", "--clip-ratio-high", "0.3"]
    flags += ["--entropy-coef", "0.01", "--action-reconstruction-coef", "0.02", "--aux-loss-coef", "0.03"]
    flags += ["--advantage-clamp", "10", "--verifier-gamma", "0.9", "--gamma", "0.8", "--gae-lambda", "0.7"]
    flags += ["--vf-coef", "0.6", "--cliprange-value", "0.4"]
    algorithm = load_config(overrides=flags).algorithm
    assert (algorithm.name, algorithm.epochs, algorithm.clip_low, algorithm.clip_high) == ("cpgd", 5, 0.1, 0.3)
    assert (algorithm.entropy_coef, algorithm.action_reconstruction_coef, algorithm.aux_loss_coef) == (0.01, 0.02, 0.03)
    assert (algorithm.advantage_clamp, algorithm.verifier_gamma, algorithm.gamma) == (10, 0.9, 0.8)
    assert (algorithm.gae_lambda, algorithm.vf_coef, algorithm.cliprange_value) == (0.7, 0.6, 0.4)
    flags = ["--freezing-actor-steps", "2", "--lam", "0.5", "--value-loss-coef", "0.3", "--value-clip", "0.1"]
    algorithm = load_config("tabletop_ppo", flags).algorithm
    assert (algorithm.value_init_steps, algorithm.gae_lambda) == (2, 0.5)
    assert (algorithm.vf_coef, algorithm.cliprange_value) == (0.3, 0.1)
    kl = load_config(overrides=["--kl-coef", "0.1", "--kl-target", "1", "--kl-horizon", "9", "--kl-estimator", "k2"]).kl
    assert (kl.coef, kl.target, kl.horizon, kl.estimator) == (0.1, 1, 9, "k2")
    assert load_config(overrides=["--init-kl-coef", "0.2"]).kl.coef == 0.2
    flags = ["--actor-lr", "1e-6", "--critic-lr", "1e-5", "--max-norm", "2", "--micro-train-batch-size", "3"]
    config = load_config(overrides=[*flags, "--ema-beta", "0.992"])
    assert (config.optim.lr, config.optim.max_grad_norm, config.optim.microbatch_size) == (1e-6, 2, 3)
    assert (config.critic.lr, config.ema.beta) == (1e-5, 0.992)
    config = load_config(overrides=["--value-learning-rate", "1e-4", "--max-grad-norm", "0.5"])
    assert (config.critic.lr, config.optim.max_grad_norm) == (1e-4, 0.5)
    config = load_config(overrides=["--reward-fn", "remote", "--remote-rm-url", "http://localhost:8000/score"])
    assert (config.reward.source, config.reward.url) == ("remote", "http://localhost:8000/score")
    flags = ["--reward-fn", "combined", "--reward.sources", "sparse", "rules", "--length-penalty", "0.5"]
    reward = load_config(overrides=[*flags, "--reward-recipe", "*drawer* -> sparse=2"]).reward
    assert (reward.recipe, reward.length_penalty) == (("*drawer* -> sparse=2",), 0.5)
    flags = ["--curriculum.mode", "adaptive", "--curriculum-ema-alpha", "0.9", "--curriculum-tau", "0.25"]
    curriculum = load_config(overrides=flags).curriculum
    assert (curriculum.ema_alpha, curriculum.tau) == (0.9, 0.25)
    flags = ["--distributed.backend", "ray", "--actor-num-gpus-per-node", "4", "2", "--distributed.address", "auto"]
    flags += ["--sharding-strategy", "full", "--offload", "--async-mode", "--env-gpu-id", "3"]
    flags += ["--vllm-num-engines", "2", "--vllm-tensor-parallel-size", "4", "--vllm-enforce-eager"]
    flags += ["--vllm-sync-backend", "nccl", "--enable-prefix-caching", "--gpu-memory-utilization", "0.5"]
    config = load_config(overrides=flags)
    distributed, vllm = config.distributed, config.vllm
    assert (distributed.learners_per_node, distributed.sharding, distributed.cpu_offload) == ((4, 2), "full", True)
    assert distributed.asynchronous and config.env.render_gpu == 3
    assert (vllm.num_engines, vllm.tensor_parallel_size, vllm.enforce_eager) == (2, 4, True)
    assert (vllm.sync_backend, vllm.prefix_caching, vllm.gpu_memory_utilization) == ("nccl", True, 0.5)
    for flag in ("--n-epochs", "--num-epochs"):
        assert load_config(overrides=[flag, "4"]).algorithm.epochs == 4
    assert set(ALIASES) == {
        *(
            "model",
            "task-suite",
            "task-id",
            "task-ids",
            "num-envs",
            "timesteps",
            "use-wandb",
            "value-init-steps",
            "seed",
            "name",
        ),
        *("vla-path", "pretrained-checkpoint", "unnorm-key", "use-proprio", "num-images-in-input"),
        *("enable-gradient-checkpointing", "use-lora", "lora-rank", "lora-alpha", "lora-dropout"),
        *("lora-target-modules", "load-adapter-checkpoint"),
        *("actor-lr", "critic-lr", "value-learning-rate", "max-grad-norm", "max-norm", "micro-train-batch-size"),
        *("ema-beta", "remote-rm-url", "reward-fn", "reward-recipe", "length-penalty"),
        *("curriculum-ema-alpha", "curriculum-tau"),
        *("freezing-actor-steps", "advantage-estimator", "max-epochs", "n-epochs", "num-epochs"),
        *("clip-ratio-low", "clip-ratio-high", "entropy-coef", "action-reconstruction-coef", "aux-loss-coef"),
        *("advantage-clamp", "verifier-gamma", "gamma", "lam", "gae-lambda", "vf-coef", "value-loss-coef"),
        *("actor-num-gpus-per-node", "sharding-strategy", "offload", "async-mode", "env-gpu-id"),
        *("vllm-num-engines", "vllm-tensor-parallel-size", "vllm-enforce-eager", "vllm-sync-backend"),
        *("enable-prefix-caching", "gpu-memory-utilization"),
        *("cliprange-value", "value-clip", "kl-coef", "init-kl-coef", "kl-target", "kl-horizon", "kl-estimator"),
    }


def test_values_from_python():
    config = load_config(overrides={"optim.lr": 1, "env": {"task_ids": [0, 1]}})
    assert config.optim.lr == 1.0 and config.env.task_ids == (0, 1)
    assert problems(overrides={"optim.lr": "fast"}) == ["optim.lr = 'fast': must be a number >= 0"]


def test_the_written_file_reads_back_to_the_same_values(tmp_path):
    config = load_config(overrides=["--optim.lr", "1e-07", "--env.task_ids", "3", "--run.name", "12"])
    assert load_config(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "1e-3"], "--lr: unknown option; did you mean --optim.lr or --critic.lr?"),
        (["--optim.learning_rate=1"], "--optim.learning_rate: unknown option; did you mean --optim.lr?"),
        (["--algorithm.lr", "1"], "--algorithm.lr: unknown option; did you mean --optim.lr or --critic.lr?"),
        (["--interval", "1"], "--interval: unknown option; did you mean --eval.interval or --checkpoint.interval?"),
        (["--optim.max_grad_nrm", "1"], "--optim.max_grad_nrm: unknown option; did you mean --optim.max_grad_norm?"),
        (["--optin.warmup_iterations", "1"], "--optin.warmup_iterations: unknown option; did you mean --optim.warmup_iterations or "
            "--critic.warmup_iterations?"),
        (["--task-siute", "x"], "--task-siute: unknown option; did you mean --task-suite?"),
        (["--no-optim.lr"], "--no-optim.lr: unknown option; did you mean --optim.lr or --critic.lr?"),
        (
            ["--ema.zzz", "1"],
            "--ema.zzz: unknown option; options of ema: beta",
        ),
        (["-x"], "-x: unknown option; sections: " + ", ".join(Config.model_fields)),
        (["--optim.lr"], "--optim.lr: needs a value: a number >= 0"),
        (["--optim.lr", "fast"], "optim.lr = 'fast' (--optim.lr): must be a number >= 0"),
        (["--optim.lr", "-1"], "optim.lr = -1 (--optim.lr): must be a number >= 0"),
        (["--optim.lr", ".nan"], "optim.lr = nan (--optim.lr): must be a number >= 0"),
        (["--optim.lr", ".inf"], "optim.lr = inf (--optim.lr): must be a number >= 0"),
        (["--seed", "1.5"], "run.seed = 1.5 (--seed): must be an integer >= 0"),
        (["--seed", str(2**63)], f"run.seed = {2**63}: must be {2**63 - 1} or less: random number generators take no larger seed"),
        (["--seed", "!!int x"], "run.seed = '!!int x' (--seed): must be an integer >= 0"),
        (["--run.iterations", "true"], "run.iterations = true (--run.iterations): must be an integer > 0"),
        (["--run.num_threads", "0"], "run.num_threads = 0 (--run.num_threads): must be an integer > 0 or null"),
        (["--logging.wandb=yes"], "logging.wandb = 'yes' (--logging.wandb): must be true or false"),
        (["--algorithm.name", "gppo"], "algorithm.name = 'gppo' (--algorithm.name): must be one of grpo, rloo, group_norm, cpgd, reinforce, reinforce_baseline, reinforce_pp, ppo; did you mean 'ppo'?"),
        (["--env.task_ids", "0", "x"], "env.task_ids[1] = 'x' (--env.task_ids): must be a list of integers >= 0, or null"),
        (["--optim.betas", "0.9", "1"], "optim.betas[1] = 1 (--optim.betas): must be a list of 2, each a number >= 0 and < 1"),
        (["--optim.betas", "0.9"], "optim.betas[1] = [0.9] (--optim.betas): must be a list of 2, each a number >= 0 and < 1"),
        (["stray"], "stray: unexpected argument"),
    ],
)  # fmt: skip
def test_messages_for_flags(flags, message):
    assert problems(overrides=flags) == [message]


def test_messages_for_files_name_the_line(tmp_path):
    path = write(
        tmp_path,
        "# mine\noptim:\n  lr: quick\n  lerning_rate: 1\nlr: 3\nalgoritm:\n  name: ppo\nreward: sparse\nrun:\n  name: 3\n",
    )
    assert problems(path) == [
        f"run.name = 3 ({path}, line 10): must be text or null",
        f"reward = 'sparse' ({path}, line 8): must be a section: options of reward below it",
        f"optim.lr = 'quick' ({path}, line 3): must be a number >= 0",
        f"optim.lerning_rate = 1 ({path}, line 4): unknown option; did you mean optim.lr?",
        f"lr = 3 ({path}, line 5): unknown option; did you mean optim.lr or critic.lr?",
        f"algoritm = {{…}} ({path}, line 6): unknown section; did you mean algorithm?",
    ]


def test_a_key_given_twice_is_reported(tmp_path):
    path = write(tmp_path, "optim:\n  lr: 1\n  lr: 2\n")
    assert problems(path) == [f"optim.lr ({path}, line 3): already given in line 2; keep one of them"]


def test_keys_that_are_no_text_are_reported(tmp_path):
    (problem,) = problems(write(tmp_path, "ema:\n  1: 2\n"))
    assert problem.endswith("line 2): unknown option; options of ema: beta")


def test_all_errors_come_at_once_schema_and_cross_section(tmp_path):
    path = write(tmp_path, "env:\n  suite: tabletop_gaol\noptim:\n  lr: x\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["--rollout.group_size", "1", "--lr", "1", "--eval.interval", "often"])
    assert str(caught.value) == (
        "5 problems in the configuration:\n"
        "  - --lr: unknown option; did you mean --optim.lr or --critic.lr?\n"
        f"  - optim.lr = 'x' ({path}, line 4): must be a number >= 0\n"
        "  - eval.interval = 'often' (--eval.interval): must be an integer >= 0\n"
        "  - env.suite = 'tabletop_gaol': unknown suite; did you mean 'tabletop_goal'? Known: "
        f"{', '.join(KNOWN_SUITES)}\n"
        "  - rollout.group_size = 1 with algorithm.name = 'grpo': GRPO compares the episodes of a group with each other; "
        "set rollout.group_size to 2 or more, or algorithm.name to ppo"
    )


def test_a_rule_over_a_wrong_value_is_not_reported_on_top():
    assert problems(overrides=["--algorithm.name", "pp", "--rollout.group_size", "1"]) == [
        "algorithm.name = 'pp' (--algorithm.name): must be one of grpo, rloo, group_norm, cpgd, reinforce, reinforce_baseline, reinforce_pp, ppo; did you mean 'ppo'?"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "optim:\n  lr: [1\n",
            "mine.yaml, line 3, column 1: not valid YAML: expected ',' or ']', but got '<stream end>'",
        ),
        (
            "optim:\n\tlr: 1\n",
            "mine.yaml, line 2, column 1: not valid YAML: found character '\\t' that cannot start any token",
        ),
        ("- a\n", "mine.yaml: must hold sections with options, such as `optim:` with `lr: 1e-4` below it"),
        ("optim:\n  lr: !!float fast\n", "mine.yaml: not valid YAML: could not convert string to float: 'fast'"),
        ("a: 1\n---\nb: 2\n", "mine.yaml, line 2, column 1: not valid YAML: but found another document"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing yet\n")) == Config()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "tabletop_gpro",
            "tabletop_gpro: unknown preset; did you mean 'tabletop_grpo'? Known: libero_10_cluster, ",
        ),
        ("nowhere/x.yaml", "no file nowhere/x.yaml; presets: libero_10_cluster, "),
    ],
)
def test_sources_that_do_not_exist(source, message):
    with pytest.raises(UsageError) as caught:
        load_config(source)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2


def test_a_folder_is_no_configuration(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UsageError, match=r"is a folder; .*config\.yaml \(or --resume "):
        load_config(tmp_path)


def test_a_preset_of_the_other_command_is_answered_with_that_command():
    (problem,) = problems("tabletop_base")
    assert problem.endswith("tabletop_base.yaml: this is a configuration for `vlarl finetune`")
    (problem,) = problems("tabletop_ppo", schema=FinetuneConfig)
    assert problem.endswith("tabletop_ppo.yaml: this is a configuration for `vlarl train`")
