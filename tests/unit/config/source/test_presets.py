"""Every shipped configuration loads, names what it is for, and can be run dry."""

import re
from pathlib import Path

import pytest

from vlarl.cli import main
from vlarl.config import Config, FinetuneConfig, load_config
from vlarl.config.source.presets import DEFAULT_PRESET, PRESET_FOLDER, presets, presets_of

COMMANDS = {"train": Config, "finetune": FinetuneConfig}
LEARNERS = {"tabletop_cluster": 2, "libero_10_cluster": 8}
SHIPPED = [(command, name) for command, schema in COMMANDS.items() for name in presets_of(schema)]


def test_every_file_belongs_to_one_command():
    assert sorted(name for _, name in SHIPPED) == sorted(presets())
    assert {"tabletop_grpo", "tabletop_ppo", "tabletop_ppo_openvla", "prompts_grpo", "prompts_ppo"} <= set(
        presets_of(Config)
    )
    assert set(presets_of(FinetuneConfig)) == {
        "tabletop_base",
        "tabletop_base_openvla",
        "tabletop_base_smolvla",
        "metaworld_base",
        "libero_spatial_base",
        "prompts_reward",
        "tabletop_reward",
    }


@pytest.mark.parametrize(("command", "name"), SHIPPED)
def test_dry_run_of_every_preset(command, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {  # by another preset, and by a script
        "metaworld_grpo": "runs/metaworld_base/checkpoints/final/config.json",
        "prompts_reward": "pairs/pairs.jsonl",
    }
    if name in made:
        (tmp_path / made[name]).parent.mkdir(parents=True)
        (tmp_path / made[name]).touch()
    before = sorted(tmp_path.rglob("*"))
    assert main([command, name, "--dry-run"]) == 0
    assert sorted(tmp_path.rglob("*")) == before, "it writes nothing"
    printed = capsys.readouterr().out
    assert printed.startswith(f"# starts from the preset {name}, named on the command line\n")
    written = tmp_path / "printed.yaml"
    written.write_text(printed)
    schema = COMMANDS[command]
    assert load_config(written, schema=schema) == load_config(name, schema=schema)
    assert re.search(rf"^# world_size: {LEARNERS.get(name, 1)}$", printed, re.MULTILINE)


@pytest.mark.parametrize("name", presets())
def test_the_first_line_says_what_it_is(name):
    first = (PRESET_FOLDER / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ") and 20 < len(presets()[name]) < 110


def test_the_default_is_grpo_with_the_tiny_openvla():
    config = load_config()
    assert config == load_config(DEFAULT_PRESET)
    assert (config.algorithm.name, config.policy.path) == ("grpo", "builtin:tiny-openvla")


def test_a_clone_shows_them_in_configs():
    assert (Path(__file__).parents[4] / "configs").resolve() == PRESET_FOLDER.resolve()


@pytest.mark.parametrize("name", presets_of(Config))
def test_a_preset_leaves_the_number_of_environments_to_the_suite(name):
    """On the tabletop 64 environments are one array; the same number of simulators would be 64 processes."""
    config = load_config(name)
    assert config.env.num_envs is None or config.distributed.backend == "ray" and not _is_toy(config)


@pytest.mark.parametrize(("command", "name"), SHIPPED)
def test_the_first_line_says_whether_it_is_a_toy(command, name):
    assert ("toy" in presets()[name].lower()) == _is_toy(load_config(name, schema=COMMANDS[command]))


def _is_toy(config):
    suites = config.demos.suites if isinstance(config, FinetuneConfig) else (config.env.suite,)
    is_builtin = config.policy.path.startswith("builtin:")
    return all(suite.startswith("tabletop_") or (suite.startswith("prompts_") and is_builtin) for suite in suites)
