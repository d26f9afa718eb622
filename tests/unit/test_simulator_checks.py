"""What `vlarl doctor` finds out about simulators, and `vlarl bench env` about their speed."""

import re

import pytest

from vlarl.cli import main, simulators
from vlarl.cli.simulators import check_simulators
from vlarl.errors import UsageError


def found(monkeypatch, **replaced) -> dict[str, tuple[str, str]]:
    for name, value in replaced.items():
        monkeypatch.setattr(simulators, name, value)
    return {check.name: (check.status, check.detail) for check in check_simulators()}


def test_the_backends_here_render_an_image(monkeypatch):
    checks = found(monkeypatch)
    assert checks["mujoco"] == ("ok", "3.3.0")
    assert checks["gl egl"][0] == "ok" and checks["gl egl"][1].startswith("renders with ")


def test_a_backend_that_is_not_there_says_so_and_how_to_get_it(monkeypatch):
    backends = {"nonsense": "buy a screen"}
    status, detail = found(monkeypatch, BACKENDS=backends)["gl nonsense"]
    assert status == "missing" and detail.endswith("; to use it: buy a screen") and "Error" in detail


def test_a_blank_image_is_reported(monkeypatch):
    unlit = simulators.PROBE.replace("rgba='1 0 0 1'", "rgba='0 0 1 1'")
    status, detail = found(monkeypatch, PROBE=unlit, BACKENDS={"egl": "fix it"})["gl egl"]
    assert (status, detail) == ("missing", "renders a blank image; to use it: fix it")


@pytest.mark.parametrize(("version", "reason"), [("3.3.3", "floors"), ("3.4.0", "task 5")])
def test_versions_of_mujoco_that_change_scores_are_a_warning(monkeypatch, version, reason):
    checks = found(monkeypatch, _version=lambda package: version, BACKENDS={})
    assert checks["mujoco"][0] == "warning" and reason in checks["mujoco"][1]


def test_what_is_not_installed_comes_with_its_command(monkeypatch):
    assert found(monkeypatch, _version=lambda package: None) == {
        "mujoco": ("missing", "no LIBERO, no Meta-World: run pip install -c constraints.txt -e '.[libero,metaworld]'")
    }
    versions = {"mujoco": "3.3.0"}
    checks = found(monkeypatch, _version=versions.get, BACKENDS={})
    assert checks["libero"] == ("missing", "run pip install -c constraints.txt -e '.[libero]'")


def test_missing_assets_are_said_in_one_line(monkeypatch):
    def nowhere(configured):
        raise UsageError("not on this machine:\n  get them")

    checks = found(monkeypatch, find_assets=nowhere, BACKENDS={})
    assert checks["libero"] == ("missing", "not on this machine: get them")


def test_the_speed_of_a_simulator(capsys):
    flags = ["--suite", "metaworld_mt10", "--num-envs", "1", "2", "--steps", "16", "--image-size", "32"]
    assert main(["bench", "env", *flags]) == 0
    title, one, two, resets = capsys.readouterr().out.splitlines()
    assert title == "metaworld_mt10, one camera of 32 px rendered every 8 steps: steps per second"
    assert re.fullmatch(r"  vlarl, 1 process +\d+\.\d\d  1\.00 x", one)
    assert re.fullmatch(r"  vlarl, 2 processes +\d+\.\d\d  \d+\.\d\d x", two)
    assert re.fullmatch(r"first reset \d+\.\d s, another episode \d+\.\d\d s", resets)
