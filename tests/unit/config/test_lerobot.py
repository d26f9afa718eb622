"""People who come from lerobot: which models are refused by name, and what the type of an environment means."""

import pytest

from vlarl.config.run_checkpoints import other_model
from vlarl.config.schema import Config
from vlarl.config.source.flags import parse_flags


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lerobot/pi0", "model type pi0 is not supported; OpenVLA and OpenVLA-OFT, such as"),
        ("me/pi05-libero@main", "model type pi05 is not supported"),
        ("lerobot/anything", "policies of lerobot are not supported"),
    ],
)
def test_models_of_another_kind_are_known_by_their_names(name, said):
    assert said in other_model(name)


@pytest.mark.parametrize(
    "name",
    ["openvla/openvla-7b", "lerobot/smolvla_base", "me/openvla-vs-pi0", "builtin:tiny-oft", "first", "runs/pi0/x"],
)
def test_all_others_are_read(name):
    assert other_model(name) is None


def test_a_folder_is_judged_by_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lerobot" / "pi0").mkdir(parents=True)
    assert other_model("lerobot/pi0") is None


@pytest.mark.parametrize(
    ("words", "suite"),
    [
        (["--env.type=libero"], "libero_10"),
        (["--env.type=libero", "--env.task=libero_goal"], "libero_goal"),
        (["--env.task=libero_goal", "--env.type=libero"], "libero_goal"),
    ],
)
def test_the_task_says_which_suite_of_a_type(words, suite):
    flags = parse_flags(words, Config)
    assert flags.problems == [] and flags.values == {"env.suite": suite}
