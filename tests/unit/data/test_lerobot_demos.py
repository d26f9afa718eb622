"""Demonstrations from LeRobot folders: the same training as from an RLDS folder, and nothing guessed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fakes.lerobot_data import IMAGE, WRIST, episode, features, write

from vlarl.config.finetune import DemoConfig, FinetuneConfig
from vlarl.data.conversion import Conversion, to_lerobot
from vlarl.data.demos import collect_demos, open_recording, open_sources
from vlarl.data.finetune import sampling_weights
from vlarl.data.lerobot.declared import Declared
from vlarl.data.lerobot.demos import LeRobotSource
from vlarl.data.lerobot.mapped import MappedDataset
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.lerobot.writer import LeRobotWriter
from vlarl.data.recorded_demos import is_in_fraction
from vlarl.data.rlds.reader import RldsDataset
from vlarl.errors import UsageError
from vlarl.run.finetune import finetune

GOLDEN = Path(__file__).parents[2] / "golden"


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same episodes in both formats."""
    folder = tmp_path_factory.mktemp("converted") / "any_name"
    to_lerobot(RldsDataset(GOLDEN / "rlds"), folder, Conversion(fps=20), quiet)
    return {"rlds": GOLDEN / "rlds", "lerobot": folder}


def test_a_policy_has_the_same_loss_from_either_format(tmp_path, folders):
    summaries = {}
    for kind, folder in folders.items():
        config = FinetuneConfig.model_validate(
            {
                "run": {"root": str(tmp_path), "name": kind, "num_threads": 1, "device": "cpu"},
                "policy": {"path": "init:tiny-oft", "num_images": 2},
                "demos": {"path": str(folder)},
                "optim": {"steps": 3, "batch_size": 4, "lr": 1e-3, "warmup_steps": 1, "log_interval": 1},
            }
        )
        summaries[kind] = finetune(config)
    rows = [
        [json.loads(line)["train/loss"] for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        for kind in folders
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert summaries["rlds"].first_loss == summaries["lerobot"].first_loss
    trained = [
        json.loads((tmp_path / kind / "checkpoints/final/training_data.json").read_text())["trained_on"]
        for kind in folders
    ]
    assert trained[0] == trained[1] and trained[0][0]["suite"] == "libero_spatial"


def test_all_of_a_set_of_demonstrations_is_equal(folders):
    rlds, lerobot = (
        collect_demos(open_sources(DemoConfig(path=str(folder)), 0, 56, 2), quiet)[0][0] for folder in folders.values()
    )
    assert lerobot.name == rlds.name and lerobot.instructions == rlds.instructions
    for name in ("proprio", "actions", "instruction_ids", "episode_lengths", "success"):
        np.testing.assert_array_equal(getattr(lerobot, name), getattr(rlds, name))
    for row in (0, 77, len(rlds) - 1):
        np.testing.assert_array_equal(lerobot.images[row], rlds.images[row])


@pytest.mark.parametrize(
    ("gripper", "expected"),
    [("closed_is_1", [1, 0]), ("open_is_1", [0, 1]), ("as_recorded", [-1, 1])],
)
def test_the_gripper_is_converted_as_declared(tmp_path, gripper, expected):
    write(tmp_path / "data", gripper=None)
    demos = LeRobotSource(DemoConfig(gripper=gripper), str(tmp_path / "data"), 1).collect(quiet)
    recorded = np.concatenate([e.values("action")[:, -1] for e in LeRobotDataset(tmp_path / "data")])
    for value, wanted in zip((-1, 1), expected, strict=True):
        assert set(demos.actions[recorded == value, -1]) == {wanted}


def test_a_gripper_that_is_not_declared_is_not_guessed(tmp_path):
    write(tmp_path / "data", gripper=None)
    with pytest.raises(
        UsageError,
        match=r"demos.path: .*data: the dataset does not say what its gripper means, whose values are -1 to 1: declare it "
        r"with demos.gripper, one of closed_is_1, open_is_1, as_recorded \(LIBERO's is closed_is_1\)",
    ):
        open_sources(DemoConfig(path=str(tmp_path / "data")), 0, 56, 1)


def mapped(tmp_path: Path, text: str, num_images: int = 1, **options: object) -> LeRobotSource:
    """A source of the folder `data`, whose mapping is declared in a file."""
    (tmp_path / "mapping.yaml").write_text(text)
    config = DemoConfig.model_validate({"mapping": str(tmp_path / "mapping.yaml"), **options})
    return LeRobotSource(config, str(tmp_path / "data"), num_images)


def test_a_mapping_reads_any_features_by_lerobots_names(tmp_path):
    recorded = write(tmp_path / "data", gripper=None)
    source = mapped(
        tmp_path,
        f"my_robot: {{primary: {WRIST}, secondary: {IMAGE}, state: ['observation.state[2:4]', one, 'zeros[1]'], "
        "action: ['action[0:3]', 'action[-1:] | clip | invert']}",
        num_images=2,
        dataset_name="my_robot",
        views=("secondary", "primary"),
    )
    demos = source.collect(quiet)
    assert demos.name == source.suite == "my_robot" and (source.action_dim, source.proprio_dim) == (4, 4)
    state, action, one = (
        np.concatenate([episode.values(name) for episode in recorded])
        for name in ("observation.state", "action", "one")
    )
    np.testing.assert_array_equal(demos.proprio[:, :2], state[:, 2:4])
    np.testing.assert_array_equal(demos.proprio[:, 2], one.reshape(-1).astype(np.float32))
    assert not demos.proprio[:, 3].any()
    np.testing.assert_array_equal(demos.actions[:, :3], action[:, :3])
    np.testing.assert_array_equal(demos.actions[:, 3], np.where(action[:, 6] == -1, 1, 0))
    np.testing.assert_array_equal(
        demos.images[6], [recorded[1].images(IMAGE, [1])[0], recorded[1].images(WRIST, [1])[0]]
    )
    assert [demos.instructions[index] for index in demos.instruction_ids[[0, 5, 8]]] == [
        "open the drawer",
        "close it",
        "open the drawer",
    ]
    assert demos.success.tolist() == [True, False, True]


def test_a_mapping_without_transforms_is_as_recorded(tmp_path):
    recorded = write(tmp_path / "data", gripper="closed_is_1")
    demos = mapped(tmp_path, f"libero_spatial: {{primary: {IMAGE}, action: [action]}}").collect(quiet)
    np.testing.assert_array_equal(demos.actions, np.concatenate([one.values("action") for one in recorded]))


@pytest.mark.parametrize(
    ("text", "num_images", "complaint"),
    [
        (f"{{primary: {IMAGE}, action: [action]}}", 2, r"lacks a wrist view; it has observation.images.image, "),
        ("{primary: left, action: [action]}", 1, "lacks left; it has observation.images.image, "),
        ("{primary: action, action: [action]}", 1, r"describes action as tensor \[7\], but a view is an image"),
        (f"{{primary: {IMAGE}, action: [phase]}}", 1, "no tensor field 'phase'; there are observation.state, action, "),
        (f"{{primary: {IMAGE}, action: ['action[0:9]']}}", 1, r"action has 7 columns, not \[0:9\]"),
        (f"{{primary: {IMAGE}, action: [action], instruction: one}}", 1, "no text field 'one'; there are phase, task"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused_with_the_features_that_there_are(tmp_path, text, num_images, complaint):
    write(tmp_path / "data")
    with pytest.raises(UsageError, match=complaint):
        mapped(tmp_path, f"libero_spatial: {text}", num_images)


def test_a_mapping_of_another_dataset_is_not_passed_over(tmp_path):
    write(tmp_path / "data")
    with pytest.raises(UsageError, match="declares libero_goal, but not libero_spatial: add it as libero_spatial"):
        mapped(tmp_path, "libero_goal: {action: [action]}")


def test_features_without_a_usual_name_are_declared_by_a_mapping(tmp_path):
    recorded = write(tmp_path / "data")
    info = json.loads((recorded.folder / "meta/info.json").read_text())
    info["features"]["joints"] = info["features"].pop("observation.state")
    (recorded.folder / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(
        UsageError,
        match="no feature is known as the robot's state: declare it with demos.mapping .* Its features are obs",
    ):
        LeRobotSource(DemoConfig(), str(recorded.folder), 1)


def test_episodes_and_steps_are_left_out_as_for_rlds(tmp_path):
    recorded = write(tmp_path / "data")
    checksums = [one.checksum for one in MappedDataset(recorded)]
    assert len(set(checksums)) == 3
    source = LeRobotSource(DemoConfig(holdout=0.5), str(tmp_path / "data"), 1)
    expected = [length for length, checksum in zip((5, 3, 4), checksums, strict=True) if is_in_fraction(checksum, 0.5)]
    assert 0 < len(expected) < 3
    assert source.collect(quiet, held_out=True).episode_lengths.tolist() == expected
    assert sum(source.collect(quiet).episode_lengths) == 12 - sum(expected)
    ends = f"libero_spatial: {{primary: {IMAGE}, action: [next.success, 'action[-1:]'], noops: motionless}}"
    demos = mapped(tmp_path, ends).collect(quiet)  # the first dimension moves in the last step of episodes 0 and 2
    assert demos.episode_lengths.tolist() == [1, 1]
    np.testing.assert_array_equal(demos.images[1][0], recorded[2].images(IMAGE, [3])[0])


def test_a_checksum_does_not_depend_on_the_other_episodes(tmp_path):
    write(tmp_path / "all")
    with LeRobotWriter(tmp_path / "last", features(), 10, Declared("libero_spatial", "closed_is_1")) as writer:
        writer.add(*episode(2))
    alone, all_of_them = (MappedDataset(LeRobotDataset(tmp_path / name)) for name in ("last", "all"))
    assert alone[0].checksum == all_of_them[2].checksum


def test_a_mixture_holds_datasets_of_both_formats(tmp_path):
    shutil.copytree(GOLDEN / "rlds", tmp_path / "recorded")
    write(tmp_path / "lerobot")
    (tmp_path / "lerobot/meta/vlarl.json").write_text(json.dumps({"gripper": "closed_is_1"}))
    config = DemoConfig(path=str(tmp_path), mixture=("recorded:1", "lerobot:3"), damaged="skip")
    sources = open_sources(config, 0, 56, 1)
    assert [source.name for source in sources] == ["libero_spatial", "lerobot"]
    sets, _ = collect_demos(sources, quiet)
    assert [len(part) for part in sets] == [126, 12] and sampling_weights(config, sets) == [1, 3]


def test_success_is_what_the_dataset_says(tmp_path):
    write(tmp_path / "data")
    source = LeRobotSource(DemoConfig(only_successful=True), str(tmp_path / "data"), 1)
    assert source.collect(quiet).success.tolist() == [True, False, True]
    (kept,), fraction = collect_demos([source], quiet)
    assert len(kept) == 5 + 4 and fraction == 2 / 3
    golden = str(GOLDEN / "lerobot" / "lerobot_image")
    notes: list[str] = []
    assert LeRobotSource(DemoConfig(gripper="as_recorded"), golden, 1).collect(notes.append).success.all()
    assert notes[-1] == "lerobot_image does not say which episodes succeeded: all are taken to be successful"
    with pytest.raises(UsageError, match="demos.only_successful: .* does not say which episodes reached their goal"):
        LeRobotSource(DemoConfig(gripper="as_recorded", only_successful=True), golden, 1)


def test_options_of_the_other_format_are_refused(tmp_path):
    with pytest.raises(
        UsageError, match="demos.dataset_name, demos.gripper: .* is not in the format LeRobot, .* leave it out"
    ):
        open_recording(DemoConfig(gripper="open_is_1", dataset_name="x"), str(GOLDEN / "rlds"), 1)
    write(tmp_path / "data")
    with pytest.raises(UsageError, match="demos.split, demos.damaged: .* is not in the format RLDS, .* leave it out"):
        open_recording(DemoConfig(split="val", damaged="skip"), str(tmp_path / "data"), 1)


def test_a_folder_may_declare_itself(tmp_path):
    shutil.copytree(GOLDEN / "lerobot" / "lerobot_image", tmp_path / "data")
    declared = {"name": "libero_goal", "gripper": "closed_is_1", "views": [WRIST]}
    (tmp_path / "data/meta/vlarl.json").write_text(json.dumps(declared))
    source = LeRobotSource(DemoConfig(), str(tmp_path / "data"), 1)
    assert source.name == "libero_goal"
    np.testing.assert_array_equal(
        source.collect(quiet).images[0][0], LeRobotDataset(tmp_path / "data")[0].images(WRIST, [0])[0]
    )
