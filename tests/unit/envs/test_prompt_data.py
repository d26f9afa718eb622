"""The user's prompts: files of TRL's and verl's kind, their images, their split, and what can't be used."""

import base64
import io
import json
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
from PIL import Image

from vlarl.config.schema import Config, PromptsConfig
from vlarl.envs.build import build_prompts
from vlarl.envs.prompts import rows as rows_module
from vlarl.envs.prompts.dataset import PromptDataset
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.source import PromptError
from vlarl.errors import MissingExtraError, UsageError
from vlarl.evaluation.request import eval_request
from vlarl.rollout.epochs import EpochSampler
from vlarl.types import Task

RED, BLUE = np.full((4, 6, 3), (200, 10, 10), np.uint8), np.full((3, 3, 3), (10, 10, 200), np.uint8)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(path: str | Path, *more: str | Path, **options) -> PromptDataset:
    return PromptDataset(PromptsConfig(path=(str(path), *map(str, more)), **options))


def prompt_of(tmp_path: Path, row: dict, **options):
    """The prompt of one row of a file."""
    return dataset(write(tmp_path / "data.jsonl", [row, {"prompt": "other"}]), **options).prompt(0, 0)


def test_a_text_stays_a_text_and_every_other_column_is_kept(tmp_path):
    prompt = prompt_of(tmp_path, {"prompt": "2 + 2 =", "solution": "4", "level": 3, "image": None})
    assert prompt.text == "2 + 2 =" and not prompt.conversational
    assert prompt.columns == {"solution": "4", "level": 3} and prompt.images == ()


def test_messages_are_a_conversation_and_a_system_message_is_put_before_them(tmp_path):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2 + 2?"},
    ]
    prompt = prompt_of(tmp_path, {"prompt": messages}, system="Be brief.")
    assert prompt.conversational and prompt.text == "2 + 2?"
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, *messages)
    own = [{"role": "system", "content": "Mine."}, *messages]
    assert prompt_of(tmp_path, {"prompt": own}, system="Be brief.").messages == tuple(own)


@pytest.mark.parametrize("form", ["path", "bytes", "base64", "uri", "array", "dict path"])
def test_an_image_in_any_form_stands_before_the_text(tmp_path, form):
    (tmp_path / "red.png").write_bytes(png(RED))
    encoded = base64.b64encode(png(RED)).decode()
    value = {
        "path": "red.png",
        "bytes": {"bytes": encoded, "path": None},
        "base64": encoded,
        "uri": f"data:image/png;base64,{encoded}",
        "array": RED.tolist(),
        "dict path": {"bytes": None, "path": "red.png"},
    }[form]
    for column in ({"image": value}, {"images": [value]}):
        prompt = prompt_of(tmp_path, {"prompt": [{"role": "user", "content": "Which colour?"}], **column})
        assert np.array_equal(prompt.images[0], RED) and len(prompt.images) == 1
        assert prompt.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
        assert prompt.text == "Which colour?" and not set(prompt.columns) & {"image", "images"}


def test_placeholders_of_verl_are_split_in_their_order(tmp_path):
    (tmp_path / "red.png").write_bytes(png(RED))
    (tmp_path / "blue.png").write_bytes(png(BLUE))
    row = {
        "data_source": "geo",
        "prompt": [{"role": "user", "content": "Is <image>like <image>?"}],
        "images": ["red.png", "blue.png"],
        "reward_model": {"style": "rule", "ground_truth": "no"},
        "extra_info": {"index": 0},
    }
    prompt = prompt_of(tmp_path, row)
    kinds = [(part["type"], part.get("text")) for part in prompt.messages[0]["content"]]
    assert kinds == [("text", "Is "), ("image", None), ("text", "like "), ("image", None), ("text", "?")]
    assert [image.shape for image in prompt.images] == [(4, 6, 3), (3, 3, 3)]
    assert prompt.columns["reward_model"]["ground_truth"] == "no" and prompt.columns["extra_info"] == {"index": 0}
    plain = prompt_of(tmp_path, {"prompt": "write <image> in HTML"})
    assert plain.messages[0]["content"] == "write <image> in HTML", "without images it is a text like any other"


def test_parts_of_trl_and_images_inside_of_them_are_read(tmp_path):
    (tmp_path / "red.png").write_bytes(png(RED))
    content = [
        {"type": "text", "text": "Look:"},
        {"type": "image", "image": "red.png", "text": None},
        {"type": "text", "text": "Well?"},
    ]
    prompt = prompt_of(tmp_path, {"prompt": [{"role": "user", "content": content}]})
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["text", "image", "text"]
    assert np.array_equal(prompt.images[0], RED) and prompt.text == "Look:\nWell?"


def test_frames_of_a_video_are_taken_at_equal_distances(tmp_path):
    frames = [np.full((16, 16, 3), 10 * i, np.uint8) for i in range(20)]
    imageio.mimwrite(tmp_path / "clip.mp4", frames, fps=10, macro_block_size=None)
    prompt = prompt_of(tmp_path, {"prompt": "What happens?", "video": "clip.mp4"}, video_frames=3)
    (video,) = prompt.videos
    assert video.shape == (3, 16, 16, 3)
    assert np.abs(video.reshape(3, -1).mean(axis=1) - [0, 100, 190]).max() < 12  # an mp4 is lossy
    assert prompt.messages[0]["content"][0] == {"type": "video"}
    assert prompt.video_fps == pytest.approx([2 / 1.9]), "the last frame is 1.9 seconds after the first"
    arrays = prompt_of(tmp_path, {"prompt": "?", "videos": [np.stack(frames).tolist()]}, video_frames=4)
    assert arrays.videos[0][:, 0, 0, 0].tolist() == [0, 60, 130, 190] and arrays.video_fps == (None,)
    listed = prompt_of(tmp_path, {"prompt": "?", "video": [frame.tolist() for frame in frames[:2]]})
    assert listed.videos[0].shape == (2, 16, 16, 3)


CHAT = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("row", "options", "says"),
    [
        ({"question": "2?"}, {}, r"has no column 'prompt'; .*prompts.prompt_column \(its columns: question\)"),
        ({"prompt": "  "}, {}, r"has an empty prompt"),
        ({"prompt": []}, {}, r"has an empty prompt"),
        ({"prompt": 7}, {}, r"has a prompt that is neither a text nor a list of messages \(7\)"),
        ({"prompt": [{"role": "system", "content": "x"}]}, {}, r"has an empty prompt"),
        ({"prompt": [{"role": "user"}]}, {}, r"has a message without role and content"),
        (
            {"prompt": [{"role": "human", "content": "x"}]},
            {},
            r"has a message of the role 'human'; use one of system, user",
        ),
        ({"prompt": "2?"}, {"solution_column": "target"}, r"has no column 'target', which prompts.solution_column"),
        ({"prompt": "2?", "image": "gone.png"}, {}, r"names the image 'gone.png', and there is no file .*gone.png"),
        ({"prompt": "2?", "video": "gone.mp4"}, {}, r"names the video 'gone.mp4'"),
        (
            {"prompt": [{"role": "user", "content": "<image> ?"}], "images": ["a.png", "a.png"]},
            {},
            r"has 2 image\(s\), and its messages mention 1",
        ),
        ("text", {}, r"is not a JSON object"),
    ],
)
def test_a_row_that_can_not_be_used_is_named_with_its_file_or_left_out_and_counted(
    tmp_path, row, options, says, caplog
):
    (tmp_path / "a.png").write_bytes(png(RED))
    good = {"prompt": "fine", "target": "x"}
    path = write(tmp_path / "data.jsonl", [good, good, row, good])
    with pytest.raises(PromptError, match=rf"data.jsonl, row 2 {says}"):
        dataset(path, **options)
    left = dataset(path, on_error="skip", **options)
    assert sorted((*left.spec.train_states, *left.spec.eval_states)) == [0, 1, 3]
    assert left.num_skipped == 1 and "1 row can't be used" in caplog.text


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(PromptError, match="data.jsonl, row 1 is not valid JSON"):
        dataset(path)
    assert len(dataset(path, on_error="skip").spec.train_states) == 2, "an empty line is not a row"


def test_a_corrupt_image_is_found_when_it_is_used(tmp_path):
    (tmp_path / "bad.png").write_bytes(png(RED)[:40])
    path = write(tmp_path / "data.jsonl", [{"prompt": "?", "image": "bad.png"}] * 3)
    with pytest.raises(
        PromptError, match=r"data.jsonl, row 1 has a corrupt image: the image .*bad.png can't be decoded"
    ):
        dataset(path).prompt(0, 1)
    pool = PromptPool(dataset(path, on_error="skip"), 1)
    pool.send_reset([0], [Task("prompts", 0, 1, 0)])
    ((_, outcome),) = pool.receive()
    assert "row 1 has a corrupt image" in outcome.error, "counted as an episode that crashed"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "there is no file"),
        ("data.csv", "a,b", "has an unknown kind; use .jsonl"),
        ("data.jsonl", "\n", "has no rows"),
        ("one.jsonl", '{"prompt": "a"}\n', "1 row can be used, and none is left to evaluate on"),
    ],
)
def test_data_that_can_not_be_used_is_refused(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=says):
        dataset(tmp_path / name)


def test_the_split_follows_from_its_seed_or_from_files_of_its_own(tmp_path):
    rows = [{"prompt": f"prompt {i}"} for i in range(50)]
    path = write(tmp_path / "a.jsonl", rows)
    first, again, other = (dataset(path, eval_fraction=0.2, split_seed=seed).spec for seed in (0, 0, 1))
    assert 5 <= len(first.eval_states) <= 15 and sorted((*first.train_states, *first.eval_states)) == list(range(50))
    assert first == again and first.eval_states != other.eval_states
    held_out = write(tmp_path / "b.jsonl", [{"prompt": "held out"}] * 4)
    data = dataset(path, eval_path=(held_out,))
    assert data.spec.train_states == tuple(range(50)) and data.spec.eval_states == (50, 51, 52, 53)
    assert data.prompt(0, 49).text == "prompt 49" and data.prompt(0, 50).text == "held out"
    with pytest.raises(ValueError, match="rows 0 to 53"):
        data.prompt(0, 54)


def test_rows_stay_on_their_side_when_others_are_added(tmp_path):
    rows = [{"prompt": f"prompt {i}", "solution": i} for i in range(40)]
    first = dataset(write(tmp_path / "a.jsonl", rows), eval_fraction=0.2).spec
    more = [{"prompt": f"more {i}"} for i in range(15)]
    longer = dataset(write(tmp_path / "b.jsonl", [*more, *rows, *rows]), eval_fraction=0.2).spec
    assert [state - 15 for state in longer.eval_states if 15 <= state < 55] == list(first.eval_states)
    assert [state - 55 for state in longer.eval_states if state >= 55] == list(first.eval_states), "equal rows"
    for fraction in (1e-9, 1 - 1e-9):
        few = dataset(write(tmp_path / "c.jsonl", rows[:3]), eval_fraction=fraction).spec
        assert {len(few.eval_states), len(few.train_states)} == {1, 2}


def test_weights_say_how_often_an_epoch_has_the_rows_of_a_file(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": f"a{i}"} for i in range(4)])
    b = write(tmp_path / "b.jsonl", [{"prompt": f"b{i}"} for i in range(6)])
    held_out = write(tmp_path / "c.jsonl", [{"prompt": "c"}])
    data = dataset(a, b, weights=(2.0, 0.5), eval_path=(held_out,))
    config = Config.model_validate({"rollout": {"num_groups": 11, "group_size": 1}})
    states = [task.init_state for task in EpochSampler(config, data.spec).get_batch(1)]
    assert sorted(state for state in states if state < 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({state for state in states if state >= 4}) == 3


def test_members_of_a_group_have_one_prompt_that_is_decoded_once(tmp_path, monkeypatch):
    """Also where they follow each other in one slot. Few prompts are kept, and one that can't be used is not."""
    (tmp_path / "red.png").write_bytes(png(RED))
    (tmp_path / "bad.png").write_bytes(png(RED)[:40])
    rows = [{"prompt": str(i), "image": "bad.png" if i == 4 else "red.png"} for i in range(5)]
    source, decoded = dataset(write(tmp_path / "a.jsonl", rows), on_error="skip"), []
    decode = rows_module.decode_image
    monkeypatch.setattr(rows_module, "decode_image", lambda *given: (decoded.append(given), decode(*given))[1])
    pool = PromptPool(source, 4)
    group = pool.reset([0, 1, 2, 3], [Task("prompts", 0, 0, seed) for seed in range(4)])
    (again,) = pool.reset([0], [Task("prompts", 0, 0, 9)])
    assert len({id(seen.prompt) for seen in (*group, again)}) == 1 and len(decoded) == 1
    np.testing.assert_array_equal(group[0].prompt.images[0], source.prompt(0, 0).images[0])
    decoded.clear()
    for state in (1, 2, 3, 0):
        pool.reset([1], [Task("prompts", 0, state, 0)])
    assert len(decoded) == 4, "what is kept does not grow with the data"
    for _ in range(2):
        with pytest.raises(PromptError, match="row 4 has a corrupt image"):
            pool.reset([1], [Task("prompts", 0, 4, 0)])


def test_the_solution_column_decides_success(tmp_path):
    rows = [{"question": "2 + 2?", "target": "#### 4"}] * 2
    options = {"prompt_column": "question", "solution_column": "target", "match": "number"}
    source = build_prompts("prompts", PromptsConfig(path=(write(tmp_path / "a.jsonl", rows),), **options))
    pool = PromptPool(source, 2)
    pool.reset([0, 1], [Task("prompts", 0, 0, 0)] * 2)
    outcomes = pool.step_chunk([0, 1], ["It is 4.", "It is 5."])
    assert [outcome.success for outcome in outcomes] == [True, False]


def test_parquet_and_saved_datasets_are_read_as_arrow_has_them(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": f"<image>{i}?"}],
            "images": [{"bytes": png(RED), "path": None}],
            "solution": str(i),
        }
        for i in range(3)
    ]
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "data.parquet")
    folder = tmp_path / "saved"
    folder.mkdir()
    for part, cut in enumerate((table.slice(0, 2), table.slice(2))):
        with (
            arrow.OSFile(str(folder / f"data-{part}.arrow"), "wb") as file,
            arrow.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(cut)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{i}.arrow"} for i in range(2)]}))
    for path in (tmp_path / "data.parquet", folder):
        prompt = dataset(path).prompt(0, 2)
        assert prompt.text == "2?" and prompt.columns == {"solution": "2"}
        assert np.array_equal(prompt.images[0], RED)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "data.parquet").read_bytes()[:-20])
    with pytest.raises(UsageError, match="cut.parquet can't be read"):
        dataset(tmp_path / "cut.parquet")


def test_a_folder_of_splits_and_one_that_is_not_a_dataset_are_refused(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "state.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a folder that save_to_disk"):
        dataset(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(UsageError, match="holds several splits; name one of train"):
        dataset(tmp_path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"pyarrow is not installed.*'\.\[data\]'"):
        dataset(tmp_path / "data.parquet")


def test_an_evaluation_takes_the_held_out_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"prompt {i}"} for i in range(30)])
    options = {"env.suite": "prompts", "prompts.path": (path,), "prompts.eval_fraction": 0.2}
    request = eval_request("builtin:tiny-oft", options)
    assert request.init_states == dataset(path, eval_fraction=0.2).spec.eval_states
    assert eval_request("builtin:tiny-oft", options, states_per_task=2).init_states == request.init_states[:2]
    with pytest.raises(UsageError, match=r"prompts.path = \[\]: name the data"):
        eval_request("builtin:tiny-oft", {"env.suite": "prompts"})
