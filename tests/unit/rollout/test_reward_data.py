"""Data that the reward could not score is refused before the first episode."""

import json
import logging
import sys

import pytest
from fakes.kinds import TextPolicy

from vlarl.config.schema import Config
from vlarl.envs.build import build_pool
from vlarl.errors import UsageError
from vlarl.rollout.usable import usable_spec


class Reading(TextPolicy):
    def prompt_length(self, prompt):
        return len(prompt.text.split())


def launched(folder, rows, **options):
    """The suite as a run sees it when it starts."""
    for name, part in (("train", rows), ("eval", rows[:1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    prompts = {"path": (str(folder / "train.jsonl"),), "eval_path": (str(folder / "eval.jsonl"),)}
    prompts |= options.pop("prompts", {})
    config = Config.model_validate({"env": {"suite": "prompts"}, "prompts": prompts, **options})
    return usable_spec(config, Reading(), build_pool(config.env, config.gym, 1, 64, "sparse", config.prompts))


UNSOLVED = [{"prompt": f"prompt {i}", "target": str(i)} for i in range(3)]


@pytest.mark.parametrize(
    "reward",
    [
        {"source": "sparse"},
        {"source": "number_match"},
        {"source": "combined", "sources": ("sparse", "exact_match")},
    ],
    ids=lambda reward: reward["source"],
)
def test_a_reward_that_would_always_be_0_is_refused(tmp_path, reward):
    says = (
        r"none of 3 rows to train on has one \(their columns: prompt, target\).*prompts.solution_column.*reward.source"
    )
    with pytest.raises(UsageError, match=says):
        launched(tmp_path, UNSOLVED, reward=reward)
    assert launched(tmp_path, UNSOLVED, reward=reward, prompts={"solution_column": "target"}).train_states == (0, 1, 2)


@pytest.mark.parametrize("reward", [{"source": "format"}, {"source": "combined", "sources": ("sparse", "format")}])
def test_a_reward_that_reads_no_solution_is_accepted(tmp_path, reward, caplog):
    with caplog.at_level(logging.WARNING):
        assert launched(tmp_path, UNSOLVED, reward=reward).train_states == (0, 1, 2)
    assert not caplog.messages


def test_rows_without_a_solution_among_others_are_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        launched(tmp_path, [*UNSOLVED[:2], {"prompt": "2 + 2?", "solution": "4"}])
    assert caplog.messages == ["2 of 3 rows to train on have no solution: their reward is 0 whatever the text is"]


FUNCTIONS = """
def trl(prompts, completions, completion_ids, images, target, weight=1.0, **kwargs): ...
def trl_other(completions, solution, label, **kwargs): ...
def verl(data_source, solution_str, ground_truth, extra_info): ...
def verl_other(solution_str, ground_truth, tolerance): ...
def own(trajectory): ...
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "text_rewards_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "text_rewards_of_a_test"
    sys.modules.pop("text_rewards_of_a_test", None)


@pytest.mark.parametrize(
    ("name", "missing"), [("trl_other", "arguments solution, label"), ("verl_other", "argument tolerance")]
)
def test_a_function_that_needs_a_column_the_data_does_not_have_is_refused(tmp_path, functions, name, missing):
    says = rf"{functions}:{name} needs the {missing}, and the data has no such column \(its columns: prompt, target\)"
    with pytest.raises(UsageError, match=says):
        launched(tmp_path, UNSOLVED, reward={"source": f"{functions}:{name}"})
    with pytest.raises(UsageError, match=says):
        sources = ("format", f"{functions}:{name}")
        launched(tmp_path, UNSOLVED, reward={"source": "combined", "sources": sources})


@pytest.mark.parametrize("name", ["trl", "verl", "own"])
def test_a_function_that_gets_all_it_needs_is_accepted(tmp_path, functions, name):
    assert launched(tmp_path, UNSOLVED, reward={"source": f"{functions}:{name}"}).train_states == (0, 1, 2)


def test_the_solution_that_an_option_names_is_an_argument(tmp_path, functions):
    rows = [row | {"label": "a"} for row in UNSOLVED]
    launched(tmp_path, rows, reward={"source": f"{functions}:trl_other"}, prompts={"solution_column": "target"})
