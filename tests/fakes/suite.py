"""Rules for the whole suite, as hooks of pytest that tests/conftest.py takes over.

Tests that take long, for what they start or for how much they compute, are marked `slow`, and `make test-fast` leaves
them out. Whatever a run leaves out is said in one line at its end, with the reason; in CI, LIBERO's assets have to be
there.
"""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from fakes import golden_folder as golden
from hypothesis import settings

TESTS = Path(__file__).resolve().parents[1]
SLOW_FOLDERS = ("distributed", "e2e", "faults", "fsdp", "vllm")  # processes, clusters, whole runs
FIRST = (
    "distributed",
    "faults",
    "fsdp",
    "e2e",
    "vllm",
)  # whose files are long: short ones at the end keep all cores busy
SLOW_FIXTURES = ("libero_assets",)  # its simulator takes seconds to build a scene
SLOW_TESTS = (  # beginnings of their names: seconds of a core each, in areas that quicker tests cover, too
    "unit/data/test_rlds_demos.py::test_a_policy_is_trained_on_a_recording",
    "unit/data/test_finetune.py::test_adapters_can_be_trained",
    "unit/data/test_finetune.py::test_the_autoregressive_recipe_learns_too",
    "unit/data/test_finetune.py::test_the_regression_head_learns_and_its_checkpoint_acts",
    "unit/data/test_finetune_resume.py::test_ctrl_c_saves_and_adapters_with_dropout",
    "unit/data/test_simulator_demos.py::test_a_fresh_policy_is_trained_by_processes",
    "unit/data/test_tabletop_demos.py::test_equal_seeds_give_equal_demonstrations",
    "unit/envs/test_metaworld_env.py::",
    "unit/envs/test_metaworld_expert.py::",
    "unit/observability/test_sinks.py::test_wandb_offline",
    "unit/policies/test_memory.py::test_one_layer_more",
    "unit/policies/test_memory.py::test_one_vision_block_more",
    "unit/policies/test_openvla_weights.py::test_loading_takes_no_more_than_a_shard",
    "unit/evaluation/test_evaluation.py::test_an_evaluation_from_python",
    "unit/test_imports.py::test_adapters_do_load_peft",
    "unit/test_imports.py::test_peft_is_loaded_for_adapters_only",
    "unit/test_simulator_checks.py::test_the_speed_of_a_simulator",
    "unit/training/test_critic.py::test_a_separate_critic_learns_its_targets",
    "unit/training/test_importance.py::test_the_expected_gradient_on_stale_data",
)

# What is loaded until all tests are collected is no garbage: nothing is looked for among it, then (until
# `pytest_collection`) or later, and rarely in the processes that tests start.
gc.disable()
STARTUP = str(Path(__file__).with_name("startup"))
if STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])])

# Examples depend on no clock and no chance, and Hypothesis writes nothing into the tree.
os.environ.setdefault(
    "HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir()) / f"vlarl-hypothesis-{os.getuid()}")
)
settings.register_profile("vlarl", deadline=None, derandomize=True, database=None)
settings.load_profile("vlarl")


def pytest_configure() -> None:
    if not golden.CHOSEN.is_dir():
        raise pytest.UsageError(f"VLARL_GOLDEN names {golden.CHOSEN}, which is not a directory")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is collected again once all modules are loaded."""
    collected = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return collected


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("true", "1")


def missing(what: str, remedy: str) -> None:
    """Skip for want of something that a developer may not have, and fail in CI, where everything has to be."""
    if in_ci():
        pytest.fail(f"{what}, and with CI=true that is a failure. {remedy}", pytrace=False)
    pytest.skip(f"{what}. {remedy}")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        name = f"{item.path.relative_to(TESTS)}::{item.name}"
        uses = set(SLOW_FIXTURES) & set(getattr(item, "fixturenames", ()))
        if uses or name.split("/")[0] in SLOW_FOLDERS or name.startswith(SLOW_TESTS):
            item.add_marker(pytest.mark.slow)
    share = {item.path for item in items if "ray_here" in getattr(item, "fixturenames", ())}  # a cluster: in a row
    items.sort(key=lambda item: (_turn(item.path), item.path in share))


def _turn(path: Path) -> int:
    """When a file's tests run."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Under pytest-xdist the workers' reports arrive here, too."""
    config = terminalreporter.config
    if config.option.collectonly:
        return
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    parts = [f"{count} × {reason}" for reason, count in reasons.most_common()]
    chosen = [
        f"{flag} '{text}'" for flag, text in (("-m", config.option.markexpr), ("-k", config.option.keyword)) if text
    ]
    if chosen:
        parts.append(f"what {' and '.join(chosen)} leaves out, which make test runs")
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        parts.append("the run did not come to its end")
    terminalreporter.write_line(f"not tested: {' | '.join(parts) or 'nothing was left out of what was chosen'}")
    if golden.CHOSEN != golden.OWN:
        own = [name for name in golden.SETS if golden.golden_folder(name).parent == golden.OWN]
        rest = f"; from tests/golden: {', '.join(own)}" if own else ""
        terminalreporter.write_line(f"golden arrays from {golden.CHOSEN}{rest}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())
