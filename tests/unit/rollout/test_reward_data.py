"""Data that the reward could not score is refused before the first episode."""

import json
import logging

import pytest
from fakes.kinds import TextPolicy

from vlarl.config.schema import Config
from vlarl.envs.build import build_pool
from vlarl.errors import UsageError
from vlarl.rollout.overlong import usable_spec


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
