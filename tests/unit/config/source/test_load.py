"""Files, flags, strictness, and the exact words of the messages."""

from pathlib import Path

import pytest

from vlarl.config import Config, ConfigError, FinetuneConfig, load_config, to_yaml
from vlarl.config.known import KNOWN_SUITES
from vlarl.config.paths import located
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
        overrides=["--run.name", "12", "--logging.wandb", "--logging.wandb_group", "no"]
        + ["--logging.wandb_entity", "null"]
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
        (["--seed", str(2**63)], f"run.seed = {2**63} (--seed): must be {2**63 - 1} or less: random number generators accept no larger seed"),
        (["--seed", "!!int x"], "run.seed = '!!int x' (--seed): must be an integer >= 0"),
        (["--run.iterations", "true"], "run.iterations = true (--run.iterations): must be an integer > 0 or null"),
        (["--run.num_threads", "0"], "run.num_threads = 0 (--run.num_threads): must be an integer > 0 and <= 1024 or null"),
        (["--logging.wandb=yes"], "--logging.wandb yes: must be true or false; write --logging.wandb for true, or --no-logging.wandb for false"),
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
        f"reward = 'sparse' ({path}, line 8): must be a section: options of reward below it, such as `source: sparse`",
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
            "mine.yaml, line 3, column 1: not valid YAML: a bracket is not closed above this line; close it",
        ),
        ("optim:\n\tlr: 1\n", "mine.yaml, line 2, column 1: not valid YAML: a tab; indent by spaces"),
        (
            "optim:\n  lr: 1\n schedule: cosine\n",
            "mine.yaml, line 3, column 2: not valid YAML: this line is indented unlike those above; indent the options",
        ),
        (
            "optim:\n  lr: 1\n    schedule: cosine\n",
            "mine.yaml, line 3, column 13: not valid YAML: a colon inside a value; write each option as `name: value`",
        ),
        ("run:\n  name: 'a\n", "mine.yaml, line 3, column 1: not valid YAML: a quote is not closed above this line"),
        ("- a\n", "mine.yaml: must hold sections with options, such as `optim:` with `lr: 1e-4` below it"),
        (
            "optim:\n  lr: !!float fast\n",
            "mine.yaml, line 2, column 7: not valid YAML: the value does not fit its tag !!float; delete the tag",
        ),
        ("a: 1\n---\nb: 2\n", "mine.yaml, line 2, column 1: not valid YAML: a second document begins here; delete"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing yet\n")) == located(Config())


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


def test_a_preset_of_the_other_command_is_refused_with_that_command():
    (problem,) = problems("tabletop_base")
    assert problem.endswith("this is a configuration for `vlarl finetune`; run: vlarl finetune tabletop_base")
    (problem,) = problems("tabletop_ppo", schema=FinetuneConfig)
    assert problem.endswith("this is a configuration for `vlarl train`; run: vlarl train tabletop_ppo")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optim.lr", 1e-4], "overrides: 0.0001 in a list of flags is not text; give options as a mapping"),
        ([("optim.lr", 1e-4)], "overrides: ['optim.lr', 0.0001] in a list of flags is not text"),
        ("--optim.lr 1e-4", "overrides cannot be read from str: give options as a mapping, such as {'run.seed': 1}"),
        (b"--optim.lr", "overrides cannot be read from bytes: give options as a mapping"),
        (["--optim.lr", "1e-4", "5"], "5: unexpected argument; --optim.lr takes one value"),
    ],
)
def test_overrides_of_another_kind_are_refused(overrides, message):
    with pytest.raises(UsageError) as refusal:
        load_config("tabletop_grpo", overrides)
    assert message in str(refusal.value)
