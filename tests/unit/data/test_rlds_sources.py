"""Recorded datasets as demonstrations: what is left out, what is refused, and what a declared mapping reads."""

import logging
from pathlib import Path

import numpy as np
import pytest
from fakes.rlds_shards import frames, write_dataset

from vlarl.config.finetune import DemoConfig
from vlarl.data.demo_set import DemoSet
from vlarl.data.finetune import demo_statistics
from vlarl.data.recorded_demos import is_in_fraction
from vlarl.data.rlds.declared import check_option, find_mapping
from vlarl.data.rlds.demos import RldsSource
from vlarl.data.rlds.mapping import Part
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.tfrecord import TFRecordFile
from vlarl.errors import UsageError
from vlarl.images.lanczos import lanczos_resize

NOTES: list[str] = []


def episode(index: int, length: int = 4, text: bytes = b"lift", success: bool = True, **fields: object) -> dict:
    """An episode whose actions hold its index."""
    actions = np.full((length, 7), 0.1, np.float32)
    actions[:, 0] = index
    terminal = np.zeros(length, bool)
    terminal[-1] = success
    return {
        "action": actions,
        "observation/state": np.full((length, 8), index, np.float32),
        "observation/image": frames(length, 10 * index % 200),
        "language_instruction": [text] * length,
        "is_terminal": terminal,
        **fields,
    }


def source(root: Path, num_images: int = 1, image_size: int = 224, **options: object) -> RldsSource:
    return RldsSource(DemoConfig.model_validate(options), str(root), num_images, image_size=image_size)


def collected(root: Path, num_images: int = 1, **options: object) -> DemoSet:
    NOTES.clear()
    return source(root, num_images, **options).collect(NOTES.append)


def episodes_of(demos: DemoSet) -> list[int]:
    return demos.actions[demos.episode_starts, 0].astype(int).tolist()


def damaged(root: Path, record: int, header: bool) -> Path:
    """Change a byte of a record's data, or of its length."""
    (path,) = root.glob("*/*/*.tfrecord-*")
    at = TFRecordFile(path).offset(record)
    content = bytearray(path.read_bytes())
    content[at + (0 if header else 40)] ^= 0x10
    path.write_bytes(content)
    return path


def test_a_damaged_record_stops_the_run_with_its_file_and_byte(tmp_path):
    write_dataset(tmp_path, "made", [episode(index) for index in range(4)])
    path = damaged(tmp_path, 2, header=False)
    at = TFRecordFile(path).offset(2)
    with pytest.raises(UsageError, match=rf"{path.name}: record 2 at byte {at:,} is damaged .*demos.damaged to skip"):
        collected(tmp_path)


@pytest.mark.parametrize(("header", "left"), [(False, [0, 1, 3]), (True, [0, 1])])
def test_damaged_records_are_skipped_and_counted(tmp_path, caplog, header, left):
    """After a damaged length, the rest of the shard can't be found."""
    write_dataset(tmp_path, "made", [episode(index) for index in range(4)])
    at = TFRecordFile(next(tmp_path.glob("*/*/*.tfrecord-*"))).offset(2)
    damaged(tmp_path, 2, header)
    made = source(tmp_path, damaged="skip")
    with caplog.at_level(logging.WARNING):
        demos = made.collect(NOTES.append)
    assert episodes_of(demos) == left and made.num_damaged == 4 - len(left)
    assert f"left out {4 - len(left)} damaged of 4 episodes" in NOTES[-1]
    assert f"record 2 at byte {at:,}" in caplog.text


def test_what_follows_the_last_record_must_be_one(tmp_path):
    write_dataset(tmp_path, "made", [episode(index) for index in range(3)])
    (path,) = tmp_path.glob("*/*/*.tfrecord-*")
    path.write_bytes(path.read_bytes() + b"more than there was")
    with pytest.raises(UsageError, match="record 3 at byte .* is damaged"):
        collected(tmp_path)
    assert episodes_of(collected(tmp_path, damaged="skip")) == [0, 1]


def test_contradicting_content_is_damage_too(tmp_path):
    write_dataset(tmp_path, "made", [episode(0), episode(1) | {"action": np.zeros((3, 7), np.float32)}, episode(2)])
    with pytest.raises(UsageError, match=r"episode 1 at byte [\d,]+ can't be read \(steps/action has 3 steps"):
        collected(tmp_path)
    assert episodes_of(collected(tmp_path, damaged="skip")) == [0, 2]


def test_a_dataset_of_which_nothing_is_left_is_refused(tmp_path):
    write_dataset(tmp_path, "made", [episode(0, text=b"")])
    with pytest.raises(UsageError, match=r"no episode of .* is left \(1 without instruction\): change demos.damaged"):
        collected(tmp_path)


def test_episodes_without_instruction_are_skipped_by_default(tmp_path):
    write_dataset(tmp_path, "made", [episode(0), episode(1, text=b""), episode(2)])
    assert episodes_of(collected(tmp_path)) == [0, 2] and "left out 1 without instruction of 3" in NOTES[-1]
    assert episodes_of(collected(tmp_path, unlabeled="keep")) == [0, 1, 2]


def test_each_step_has_its_own_instruction(tmp_path):
    write_dataset(tmp_path, "made", [episode(0) | {"language_instruction": [b"open", b"open", b"lift", b"lift"]}])
    demos = collected(tmp_path)
    assert demos.instructions == ("open", "lift") and demos.instruction_ids.tolist() == [0, 0, 1, 1]


def test_splits_are_those_of_the_dataset(tmp_path):
    write_dataset(tmp_path, "made", [episode(0)], splits={"val": [episode(1), episode(2)]})
    assert episodes_of(collected(tmp_path)) == [0]
    assert episodes_of(collected(tmp_path, split="val")) == [1, 2]
    with pytest.raises(UsageError, match="no split 'test'; it has train, val"):
        collected(tmp_path, split="test")


def test_held_out_episodes_stay_so_when_others_are_added(tmp_path):
    many = [episode(index, length=2) for index in range(60)]
    write_dataset(tmp_path / "few", "made", many[:40])
    write_dataset(tmp_path / "all", "made", many[::-1])
    few, every = (source(tmp_path / name, holdout=0.25) for name in ("few", "all"))
    kept, held = few.collect(NOTES.append), few.collect(NOTES.append, held_out=True)
    assert sorted(episodes_of(kept) + episodes_of(held)) == list(range(40))
    assert set(episodes_of(every.collect(NOTES.append, held_out=True))) >= set(episodes_of(held))
    assert 0 < len(episodes_of(held)) < 20  # 10 are expected, with a std of 2.7
    draws = [is_in_fraction(checksum, 0.25) for checksum in range(20_000)]
    assert np.mean(draws) == pytest.approx(0.25, abs=0.015)  # five std


def test_steps_that_do_nothing_are_left_out_as_the_option_says(tmp_path):
    made = episode(1, length=6)
    made["action"][:, :6] = 0
    made["action"][0, 2] = made["action"][5, 2] = 0.5
    made["action"][:, 6] = [0, 0, 1, 1, 1, 1]  # the gripper closes at step 2
    made["action"][3, 1] = 9e-5  # below the norm that counts as movement, above a motionless step
    write_dataset(tmp_path, "made", [made])
    shown = {
        noops: [int(frame.max()) - 10 for frame in (demos.images[row][0] for row in range(len(demos)))]
        for noops in ("keep", "idle", "motionless")
        for demos in [collected(tmp_path, noops=noops)]
    }
    assert shown == {"keep": [0, 1, 2, 3, 4, 5], "idle": [0, 2, 5], "motionless": [0, 3, 5]}


def test_success_is_read_where_the_dataset_has_it(tmp_path):
    write_dataset(tmp_path / "with", "made", [episode(0), episode(1, success=False)])
    assert collected(tmp_path / "with").success.tolist() == [True, False]
    without = episode(0)
    del without["is_terminal"]
    write_dataset(tmp_path / "without", "made", [without])
    assert collected(tmp_path / "without").success.tolist() == [True]
    with pytest.raises(UsageError, match="demos.only_successful: .* does not say which episodes reached their goal"):
        collected(tmp_path / "without", only_successful=True)


def test_views_of_different_sizes_are_resized_to_the_policys(tmp_path):
    made = episode(3) | {"observation/wrist_image": frames(4, 90, 16, 24)}
    write_dataset(tmp_path / "data", "made", [made])
    demos = source(tmp_path / "data", 2, image_size=28).collect(NOTES.append)
    assert demos.images.shape == (4, 2, 28, 28, 3)
    wide = RldsDataset(tmp_path / "data")[0].images("steps/observation/wrist_image")[1]
    np.testing.assert_array_equal(demos.images[1][1], lanczos_resize(wide, 28))
    assert demos.images[1][0].max() == demos.images[1][0].min() == 31


def test_a_missing_view_is_refused_or_black(tmp_path):
    write_dataset(tmp_path, "made", [episode(3)])
    with pytest.raises(UsageError, match=r"lacks a secondary view; it has observation/image\. Set policy.num"):
        collected(tmp_path, 2, views=("primary", "secondary"))
    demos = collected(tmp_path, 2, missing_views="black")
    assert demos.images[0][0].min() == 30 and demos.images[0][1].max() == 0
    with pytest.raises(UsageError, match="lacks observation/wrist_image"):
        collected(tmp_path, 1, views=("wrist",), missing_views="black")
    with pytest.raises(UsageError, match="the policy reads 1 view, and 2 are named"):
        collected(tmp_path, 1, views=("primary", "wrist"))


DECLARED = """\
made:
  primary: observation/front
  state: ["observation/joints[0:2]", "zeros[1]"]
  action: ["command[0:3]", "zeros[3]", "observation/joints[-1:] | invert"]
  instruction: task
  success: done
  skip_first: 1
  noops: idle
"""


def test_a_declared_mapping_reads_a_layout_of_ones_own(tmp_path):
    joints = np.float32([[1, 2, 3, 0], [1, 2, 3, 0], [4, 5, 6, 1]])
    made = {
        "command": np.float32([[9, 9, 9], [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
        "observation/joints": joints,
        "observation/front": frames(3, 50),
        "task": [b"stack"] * 3,
        "done": np.array([False, False, True]),
    }
    write_dataset(tmp_path / "data", "made", [made])
    (tmp_path / "mine.yaml").write_text(DECLARED)
    demos = collected(tmp_path / "data", mapping=str(tmp_path / "mine.yaml"), only_successful=True)
    np.testing.assert_array_equal(demos.actions, np.float32([[0.1, 0.2, 0.3, 0, 0, 0, 1], [0.4, 0.5, 0.6, 0, 0, 0, 0]]))
    np.testing.assert_array_equal(demos.proprio, [[1, 2, 0], [4, 5, 0]])
    assert demos.images[0].min() == 51 and demos.instructions == ("stack",) and demos.success.all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("command[0:3]", "command[0:9]"), r"command has 3 columns, not \[0:9\]"),
        (
            ("command[0:3]", "actions[0:3]"),
            "there is no tensor field 'actions'; there are command, done, observation/joints",
        ),
        (("instruction: task", "instruction: text"), "there is no text field 'text'; there are task"),
        (("| invert", "| flip"), "the unknown transform 'flip'; known: clip, invert, binarise, absolute, euler"),
        (("zeros[3]", "zeros"), r"write zeros\[COUNT\]"),
        (("skip_first: 1", "skipfirst: 1"), "made.skipfirst: .*; the keys are action, state, primary"),
        (("noops: idle", "noops: lazy"), "made.noops: "),
        (("made:", "other:"), "declares other, but not made, which has no ready mapping either: add it as made"),
        (("observation/front", "observation/back"), r"lacks observation/back; it has observation/front"),
        (("command[0:3]", "command[0:3] | euler"), "euler reads the 4 columns of a quaternion, not 3"),
    ],
)
def test_a_mapping_that_does_not_fit_names_the_fields_there_are(tmp_path, change, complaint):
    made = {
        "command": np.zeros((2, 3), np.float32),
        "observation/joints": np.zeros((2, 4), np.float32),
        "observation/front": frames(2, 50),
        "task": [b"stack"] * 2,
        "done": np.array([False, True]),
    }
    write_dataset(tmp_path / "data", "made", [made])
    (tmp_path / "mine.yaml").write_text(DECLARED.replace(*change))
    with pytest.raises(UsageError, match=complaint):
        collected(tmp_path / "data", mapping=str(tmp_path / "mine.yaml"))


def test_a_ready_mapping_can_be_named_and_a_wrong_name_lists_them(tmp_path):
    assert find_mapping("bridge_orig", "renamed").movement_from_state
    with pytest.raises(UsageError, match="no ready mapping of this name; there are austin_buds.*, bridge_orig"):
        check_option("brigde")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UsageError, match="declares no mapping"):
        check_option(str(tmp_path / "empty.yaml"))


def test_parts_are_parsed_or_refused():
    assert Part.parse("observation/state[-3:-2] | clip") == Part("observation/state", -3, -2, ("clip",))
    assert Part.parse("action[:-1]") == Part("action", None, -1)
    for text in ("action[1]", "zeros[0:3]", "a b", "action | clip | unzip", "[0:3]"):
        with pytest.raises(ValueError, match="is not FIELD|write zeros|comes first"):
            Part.parse(text)


def test_statistics_have_the_originals_layout_and_values(tmp_path):
    write_dataset(tmp_path, "toto", [toto(5), toto(3)])
    demos = collected(tmp_path)
    statistics = demo_statistics(demos)
    actions = np.concatenate([np.tile(np.float32([1, 2, 3, 4, 5, 6]), (8, 1)), np.float32([[1]] * 8)], 1)
    actions[:, 0] = [0, 1, 2, 3, 4, 0, 1, 2]
    assert set(statistics) == {"action", "proprio", "num_transitions", "num_trajectories"}
    assert statistics["num_transitions"] == 8 and statistics["num_trajectories"] == 2
    assert statistics["action"]["mask"] == [True] * 6 + [False]
    for key, expected in (
        ("mean", actions.mean(0)),
        ("std", actions.std(0)),
        ("min", actions.min(0)),
        ("max", actions.max(0)),
        ("q01", np.quantile(actions, 0.01, axis=0)),
        ("q99", np.quantile(actions, 0.99, axis=0)),
    ):
        np.testing.assert_allclose(statistics["action"][key], expected, rtol=1e-6)
    assert len(statistics["proprio"]["q01"]) == 8


def toto(length: int) -> dict:
    world = np.tile(np.float32([1, 2, 3]), (length, 1))
    world[:, 0] = np.arange(length)
    return {
        "action/world_vector": world,
        "action/rotation_delta": np.tile(np.float32([4, 5, 6]), (length, 1)),
        "action/open_gripper": np.ones(length, bool),
        "observation/state": np.ones((length, 7), np.float32),
        "observation/image": frames(length, 60),
        "observation/natural_language_instruction": [b"pour"] * length,
    }


def test_fields_that_can_not_be_read_are_listed_and_left_alone(tmp_path):
    """Open-X datasets have features of other kinds, such as a tensor that is stored compressed."""
    folder = write_dataset(tmp_path, "made", [episode(0) | {"observation/depth": [b"packed"] * 4}])
    path = folder / "features.json"
    content = path.read_text().replace(
        '"depth": {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}',
        '"depth": {"tensor": {"dtype": "float32", "encoding": "zlib", "shape": {"dimensions": ["4"]}}}',
    )
    assert content != path.read_text()
    path.write_text(content)
    assert RldsDataset(tmp_path).fields["steps/observation/depth"].kind == "other"
    assert episodes_of(collected(tmp_path)) == [0]
