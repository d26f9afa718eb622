"""Rows that are imitated: prompts with their responses, as TRL's and verl's supervised training has them."""

import json

import numpy as np
import pytest
from PIL import Image

from vlarl.config.schema import PromptsConfig, PtxConfig
from vlarl.envs.prompts.responses import PromptedResponses
from vlarl.envs.prompts.source import PromptError
from vlarl.errors import UsageError

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}


@pytest.fixture
def opened(tmp_path):
    def make(*rows, system=None, **columns) -> PromptedResponses:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return PromptedResponses(file, PtxConfig(path=str(file), **columns), PromptsConfig(system=system))

    return make


@pytest.mark.parametrize(
    ("row", "columns", "messages"),
    [
        ({"prompt": "2 + 2?", "completion": "4"}, {}, (USER,)),
        ({"prompt": [USER], "completion": [FOUR]}, {}, (USER,)),
        ({"prompt": [USER], "response": "4"}, {}, (USER,)),
        ({"messages": [USER, FOUR]}, {}, (USER,)),
        ({"messages": [USER, FOUR, USER, FOUR]}, {}, (USER, FOUR, USER)),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]}, {}, (USER,)),
        ({"question": "2 + 2?", "answer": "4"}, {"prompt_column": "question", "response_column": "answer"}, (USER,)),
        ({"messages": [USER], "answer": "4"}, {"response_column": "answer"}, (USER,)),
    ],
)
def test_a_row_is_a_prompt_and_its_response(opened, row, columns, messages):
    rows = opened(row, **columns)
    observation, text = rows.sample(0)
    assert len(rows) == 1 and text == "4"
    assert observation.prompt.messages == messages
    assert observation.prompt.conversational == (not isinstance(row.get("prompt", row.get("question")), str))
    assert observation.instruction == "2 + 2?"


def test_the_system_message_of_prompts_is_put_before_these_prompts_too(opened):
    observation, _ = opened({"prompt": [USER], "completion": "4"}, system="Be brief.").sample(0)
    assert observation.prompt.messages == ({"role": "system", "content": "Be brief."}, USER)


def test_images_come_with_the_prompt(opened, tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "four.png")
    observation, text = opened({"prompt": [USER], "completion": "4", "image": "four.png"}).sample(0)
    np.testing.assert_array_equal(observation.prompt.images[0], pixels)
    assert observation.prompt.messages[0]["content"][0] == {"type": "image"} and text == "4"


@pytest.mark.parametrize(
    ("row", "columns", "says"),
    [
        ({"prompt": "2 + 2?"}, {}, r"row 1 has no column 'completion' or 'response'; name the one with the response"),
        ({"text": "4"}, {}, r"row 1 has no column 'prompt' or 'messages'; .*ptx.prompt_column \(its columns: text\)"),
        ({"prompt": "2 + 2?", "completion": "4"}, {"response_column": "answer"}, "row 0 has no column 'answer'"),
        ({"messages": [FOUR]}, {}, "row 1 has fewer than two messages"),
        ({"messages": [USER, USER]}, {}, "row 1 has a response that is neither a text nor one message"),
        ({"prompt": "2 + 2?", "completion": 4}, {}, "row 1 has a response that is neither a text nor one message"),
        (
            {"prompt": [USER], "completion": [{"role": "assistant", "content": [{"type": "image"}]}]},
            {},
            "row 1 .* is not a text",
        ),
        ({"prompt": "", "completion": "4"}, {}, "row 1 has an empty prompt"),
        ({"prompt": "2 + 2?", "completion": "4", "image": "nowhere.png"}, {}, r"row 1 .*nowhere.png"),
    ],
)
def test_a_row_that_can_not_be_imitated_is_named_when_the_data_is_opened(opened, row, columns, says):
    good = {"prompt": "2 + 2?", "completion": "4"}
    with pytest.raises(PromptError, match=rf"^ptx.path: .*rows.jsonl, {says}") as caught:
        opened(good, row, **columns)
    assert str(caught.value).endswith("Correct the row.")


def test_a_file_that_is_not_there_is_named_by_its_option(tmp_path):
    with pytest.raises(UsageError, match=r"^ptx.path: there is no file .*nowhere.jsonl"):
        PromptedResponses(tmp_path / "nowhere.jsonl", PtxConfig(path="nowhere.jsonl"), PromptsConfig())
