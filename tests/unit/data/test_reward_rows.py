"""Rows of preferences and of labelled steps: what is read, what is refused, what is held out."""

import json

import numpy as np
import pytest
from PIL import Image

from vlarl.data.reward_rows import PreferenceRows, StepRows
from vlarl.data.reward_samples import Steps, open_rows_of, split_rows
from vlarl.envs.prompts.source import PromptError
from vlarl.errors import UsageError

SAID = {"chosen": "7", "rejected": "8"}


def written(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assistant(text):
    return [{"role": "assistant", "content": text}]


def test_preferences_in_texts_and_in_messages(tmp_path):
    question = [{"role": "user", "content": "3 + 4?"}]
    rows = PreferenceRows(
        written(
            tmp_path,
            {"prompt": "3 + 4 = ", **SAID},
            {"prompt": question, "chosen": assistant("7"), "rejected": assistant("8")},
            {"chosen": question + assistant("7"), "rejected": question + assistant("8")},
        )
    )
    assert rows.contents == [("7", "8")] * 3
    prompts = [rows.candidates(index, rows.contents[index]) for index in range(3)]
    assert [[each.response for each in both] for both in prompts] == [["7", "8"]] * 3
    assert [both[0].prompt.conversational for both in prompts] == [False, True, True]
    assert [both[0].prompt.text for both in prompts] == ["3 + 4 = ", "3 + 4?", "3 + 4?"]
    assert prompts[1][0].prompt is prompts[1][1].prompt  # which is then processed once


def test_images_of_preferences(tmp_path):
    pixels = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    rows = PreferenceRows(written(tmp_path, {"prompt": "Which?", "image": "one.png", **SAID}))
    (candidate,) = rows.candidates(0, ["7"])
    np.testing.assert_array_equal(candidate.prompt.images[0], pixels)
    assert [part["type"] for part in candidate.prompt.messages[0]["content"]] == ["image", "text"]


def test_steps_are_the_response_up_to_the_end_of_each(tmp_path):
    row = {"prompt": "3 + 4 + 1?", "completions": ["3 + 4 = 7", "7 + 1 = 9"], "labels": [True, 0.25]}
    rows = StepRows(written(tmp_path, row))
    assert rows.contents == [(("3 + 4 = 7", "3 + 4 = 7\n7 + 1 = 9"), (1.0, 0.25))]
    steps = Steps(rows, np.array([0]))
    assert steps.labels.tolist() == [1.0, 0.25]
    assert [steps.candidate(index).response for index in range(2)] == ["3 + 4 = 7", "3 + 4 = 7\n7 + 1 = 9"]


@pytest.mark.parametrize(
    ("kind", "row", "words"),
    [
        (
            PreferenceRows,
            {"prompt": "a", "chosen": "b"},
            "row 1 has no column 'rejected' (its columns: prompt, chosen)",
        ),
        (PreferenceRows, SAID, "row 1 has no column 'prompt'"),
        (PreferenceRows, {"prompt": "a", "chosen": "b", "rejected": "b"}, "a chosen response that equals the rejected"),
        (PreferenceRows, {"prompt": "", **SAID}, "row 1 has an empty prompt"),
        (PreferenceRows, {"prompt": "a", "chosen": 7, "rejected": "b"}, "neither a text nor one message"),
        (PreferenceRows, {"prompt": "a", "image": "none.png", **SAID}, "none.png"),
        (
            PreferenceRows,
            {"chosen": [{"role": "user", "content": "a"}, *assistant("b")], "rejected": assistant("c")},
            "without a common prompt",
        ),
        (StepRows, {"prompt": "a", **SAID}, "row 1 has no column 'completions'"),
        (StepRows, {"prompt": "a", "completions": [], "labels": []}, "completions that are not a list of texts"),
        (StepRows, {"prompt": "a", "completions": ["b"], "labels": [True, False]}, "has 2 labels for 1 completions"),
        (StepRows, {"prompt": "a", "completions": ["b"], "labels": [2]}, "has the label 2: labels are true, false, or"),
        (StepRows, {"prompt": "a", "completions": ["b"], "labels": ["good"]}, 'has the label "good"'),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, kind, row, words):
    good = {"prompt": "a", "completions": ["b"], "labels": [True], **SAID}
    with pytest.raises(PromptError) as caught:
        kind(written(tmp_path, good, row))
    assert words in str(caught.value) and str(caught.value).startswith("reward.path:")
    assert str(caught.value).endswith("Correct the row.")


def test_rows_of_one_prompt_are_held_out_together(tmp_path):
    rows = [{"prompt": f"{index // 3}?", "chosen": "yes", "rejected": str(index)} for index in range(90)]
    kept, held = split_rows(PreferenceRows(written(tmp_path, *rows)), 0.3)
    assert sorted([*kept, *held]) == list(range(90)) and 9 <= len(held) <= 45
    assert {index // 3 for index in kept}.isdisjoint({index // 3 for index in held})
    more = [*rows, {"prompt": "other", **SAID}]
    later = split_rows(PreferenceRows(written(tmp_path, *more)), 0.3)[1]
    assert [index for index in later if index < 90] == held.tolist()
    with pytest.raises(UsageError, match=r"demos.holdout = 0.3 leaves no row"):
        split_rows(PreferenceRows(written(tmp_path, rows[held[0]])), 0.3)


def test_steps_of_one_kind_are_refused(tmp_path):
    rows = [{"prompt": "a", "completions": ["b", "c"], "labels": [True, True]}]
    with pytest.raises(UsageError, match="its 2 steps to train on are all good, and both kinds are needed"):
        open_rows_of("steps", written(tmp_path, *rows), 0.0)


@pytest.mark.parametrize("labels", ["pairs", "steps"])
def test_rows_with_images_are_refused_for_a_model_that_reads_texts_alone(tmp_path, labels):
    """It would be trained on the texts alone, and nothing would say so."""
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "one.png")
    judged = SAID if labels == "pairs" else {"completions": ["a", "b"], "labels": [True, False]}
    path = written(tmp_path, {"prompt": "1?", **judged}, {"prompt": "2?", "image": "one.png", **judged})
    with pytest.raises(PromptError, match=r"rows.jsonl, row 1 has images or videos, and policy.path reads texts alone"):
        open_rows_of(labels, path, 0.0, reads_images=False)
