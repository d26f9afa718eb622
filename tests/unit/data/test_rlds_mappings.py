"""Ready mappings: a shard of each dataset's schema, and what its convention makes of known values.

Each expectation is written by hand from the dataset's own convention, with values that tell every column apart: a movement
is 0.1, 0.2 … in its order, and a gripper goes through one change, recorded as that dataset records it.
"""

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from fakes.rlds_shards import Values, frames, write_dataset

from vlarl.config.finetune import DemoConfig
from vlarl.data.demo_set import DemoSet
from vlarl.data.inspection import summarize
from vlarl.data.rlds.demos import RldsSource
from vlarl.data.rlds.reader import RldsDataset
from vlarl.data.rlds.ready import READY, ready_mapping
from vlarl.data.statistics import dataset_statistics

T = 5
XYZ, RPY = np.float32([0.1, 0.2, 0.3]), np.float32([0.4, 0.5, 0.6])
MOVE = np.concatenate([XYZ, RPY])
HYDRA = "stanford_hydra_dataset_converted_externally_to_rlds"
FRANKA_PLAY = "nyu_franka_play_dataset_converted_externally_to_rlds"
FURNITURE = "furniture_bench_dataset_converted_externally_to_rlds"
PICKUP = "iamlab_cmu_pickup_insert_converted_externally_to_rlds"
TEXT = b"put the cup on the shelf"

# What a policy is to learn: the gripper is open, closes at the third step, and stays closed.
OPEN_THEN_CLOSED = [1, 1, 0, 0, 0]
CLOSES = np.float32([0, 0, 1, 0, 0])  # relative: +1 closes
SIGNED = np.float32([-1, -1, 1, 1, 1])  # -1 open, 1 closed
CLOSED = np.float32([0, 0, 1, 1, 1])  # 0 open, 1 closed


def every(row: np.ndarray) -> np.ndarray:
    """The same row at every step."""
    return np.tile(np.asarray(row, np.float32), (T, 1))


def columns(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part[:, None] if part.ndim == 1 else part for part in parts], axis=1).astype(np.float32)


def ramp(width: int, first: float = 1.0) -> np.ndarray:
    """A state that tells its columns apart: 1, 2, 3 …, and changes from step to step by 0.01."""
    return every(first + np.arange(width)) + 0.01 * np.arange(T, dtype=np.float32)[:, None]


def packed(values: np.ndarray) -> list[bytes]:
    return [zlib.compress(row.astype("<f4").tobytes()) for row in values]


@dataclass
class Made:
    """The schema of a dataset with values, and what is expected of it."""

    fields: dict[str, Values]
    actions: np.ndarray  # [T, 7]
    state: np.ndarray
    views: dict[str, str]  # view -> name of the image below observation
    instruction: str = "observation/natural_language_instruction"
    steps: list[int] = field(default_factory=lambda: list(range(T)))


def rt_x(gripper: np.ndarray, **fields: Values) -> dict[str, Values]:
    return {
        "action/world_vector": every(XYZ),
        "action/rotation_delta": every(RPY),
        "action/gripper_closedness_action": gripper,
        **{name.replace("__", "/"): values for name, values in fields.items()},
    }


def moving(gripper: object) -> np.ndarray:
    return columns(every(MOVE), np.float32(gripper))


def vector(action: np.ndarray, state: np.ndarray) -> dict[str, Values]:
    return {"action": action, "observation/state": state}


VECTOR = "language_instruction"
POSITIONS = ramp(7)
PADDED = columns(POSITIONS[:, :6], np.zeros(T), POSITIONS[:, 6])  # position 3, rotation 3, 0, gripper
IMAGE_AND_WRIST = {"primary": "image", "wrist": "wrist_image"}
QUARTER = np.float32([0, 0, np.sqrt(0.5), np.sqrt(0.5)])  # x, y, z, w: a quarter turn about z
TURNED = columns(every(XYZ), every([0, 0, np.pi / 2]), np.float32(OPEN_THEN_CLOSED))

# Bridge: the first step has no action; the movement is what the state did; the last step has nowhere to move to.
BRIDGE_GRIPPER = np.float32([0, 1, 0.5, 0, 0])  # open, on its way, closed
BRIDGE_ACTIONS = columns(np.full((3, 6), 0.01), np.float32([1, 0, 0]))
BRIDGE = {"primary": "image_0", "secondary": "image_1"}


def libero() -> Made:
    state = ramp(8)
    fields = vector(columns(every(MOVE), SIGNED), state)
    return Made(fields, moving(OPEN_THEN_CLOSED), state, IMAGE_AND_WRIST, VECTOR)


def robomimic(state: np.ndarray, kept: int = 8) -> Made:
    fields = vector(columns(every(MOVE), SIGNED), state)
    return Made(fields, moving(OPEN_THEN_CLOSED), state[:, :kept], IMAGE_AND_WRIST, VECTOR)


def zlib_state() -> Made:
    pose, gripper = ramp(7), ramp(1, 9.0)
    fields = rt_x(CLOSES[:, None]) | {
        "observation/clip_function_input/base_pose_tool_reached": packed(pose),
        "observation/gripper_closed": packed(gripper),
    }
    return Made(fields, moving(OPEN_THEN_CLOSED), columns(pose, gripper), {"primary": "image"})


def bridge_orig() -> Made:
    fields = vector(columns(every(MOVE), BRIDGE_GRIPPER), POSITIONS)
    return Made(fields, BRIDGE_ACTIONS, PADDED[1:-1], BRIDGE, VECTOR, steps=[1, 2, 3])


def bridge_oxe() -> Made:
    fields = rt_x(CLOSED) | {"observation/state": POSITIONS, "action/open_gripper": np.array([0, 1, 0, 0, 0], bool)}
    expected = columns(np.full((3, 6), 0.01), np.float32([1, 0, 0]))
    return Made(fields, expected, PADDED[1:-1], {"primary": "image", "secondary": "image_1"}, steps=[1, 2, 3])


def droid() -> Made:
    """Steps without movement are left out, whatever the gripper does."""
    moved = every(MOVE)
    moved[1] = 0
    pose, gripper = ramp(6), ramp(1, 9.0)
    fields = {
        "action_dict/cartesian_velocity": moved,
        "action_dict/gripper_position": np.float32([[0], [0], [0.25], [1], [1]]),  # 1 closed
        "observation/cartesian_position": pose,
        "observation/gripper_position": gripper,
    }
    kept = [0, 2, 3, 4]
    views = {"primary": "exterior_image_1_left", "secondary": "exterior_image_2_left", "wrist": "wrist_image_left"}
    actions = columns(every(MOVE)[:4], np.float32([1, 0.75, 0, 0]))
    return Made(fields, actions, columns(pose, gripper)[kept], views, VECTOR, kept)


def taco() -> Made:
    state = ramp(15)
    fields = {
        "action/rel_actions_world": columns(every(MOVE), np.float32([1, 1, -1, -1, -1])),  # 1 open, -1 closed
        "observation/robot_obs": state,
    }
    expected = columns(state[:, :6], np.zeros(T), state[:, 7])
    return Made(fields, moving(OPEN_THEN_CLOSED), expected, {"primary": "rgb_static", "wrist": "rgb_gripper"})


def jaco() -> Made:
    fields = rt_x(CLOSES[:, None]) | {"observation/end_effector_cartesian_pos": POSITIONS}
    actions = columns(every(XYZ), np.zeros((T, 3)), np.float32(OPEN_THEN_CLOSED))
    return Made(fields, actions, PADDED, {"primary": "image", "wrist": "image_wrist"})


def cables() -> Made:
    state = ramp(7)
    fields = rt_x(CLOSES) | {"observation/robot_state": state}
    views = {"primary": "image", "secondary": "top_image", "wrist": "wrist45_image"}
    return Made(fields, moving(np.zeros(T)), columns(state, np.zeros(T)), views)


def viola() -> Made:
    joints, gripper = ramp(7), ramp(1, 9.0)
    fields = rt_x(SIGNED) | {"observation/joint_states": joints, "observation/gripper_states": gripper}
    views = {"primary": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
    return Made(fields, moving(OPEN_THEN_CLOSED), columns(joints, gripper), views)


def ur5() -> Made:
    state = ramp(15)
    fields = rt_x(CLOSES) | {"observation/robot_state": state}
    return Made(fields, moving(OPEN_THEN_CLOSED), state[:, 6:14], {"primary": "image", "wrist": "hand_image"})


def toto() -> Made:
    state = ramp(7)
    fields = rt_x(CLOSES) | {"observation/state": state, "action/open_gripper": np.array(OPEN_THEN_CLOSED, bool)}
    return Made(fields, moving(OPEN_THEN_CLOSED), columns(state, np.zeros(T)), {"primary": "image"})


def bc_z() -> Made:
    """Ten future steps lie behind each other; the next one comes first."""
    future = columns(every(XYZ), ramp(27, 50.0))
    fields = {
        "action/future/xyz_residual": future,
        "action/future/axis_angle_residual": columns(every(RPY), ramp(27, 50.0)),
        "action/future/target_close": columns(CLOSED, ramp(9, 50.0)).astype(np.int64),
        "observation/present/xyz": ramp(3),
        "observation/present/axis_angle": ramp(3, 4.0),
        "observation/present/sensed_close": ramp(1, 7.0),
    }
    state = columns(ramp(3), ramp(3, 4.0), np.zeros(T), ramp(1, 7.0))
    return Made(fields, moving(OPEN_THEN_CLOSED), state, {"primary": "image"})


def language_table() -> Made:
    codes = np.zeros((T, 64), np.int32)
    codes[:, : len(TEXT)] = list(TEXT)
    fields = {
        "action": every([0.1, 0.2]),
        "observation/effector_translation": ramp(2),
        "observation/instruction": codes,
    }
    actions = columns(every([0.1, 0.2]), np.zeros((T, 4)), np.ones(T))
    return Made(fields, actions, columns(ramp(2), np.zeros((T, 6))), {"primary": "rgb"}, "observation/instruction")


def hydra() -> Made:
    state = ramp(27)
    fields = vector(columns(every(MOVE), CLOSED), state)
    expected = columns(state[:, :3], state[:, 7:10], np.zeros(T), state[:, 24])
    return Made(fields, moving(OPEN_THEN_CLOSED), expected, IMAGE_AND_WRIST, VECTOR)


def franka_play() -> Made:
    """Joints 7, movement 6, gripper 1 open and -1 closed, end of the episode."""
    state = ramp(13)
    action = columns(ramp(7, 70.0), every(MOVE), np.float32([1, 1, -1, -1, -1]), np.zeros(T))
    expected = columns(state[:, 7:], np.zeros((T, 2)))
    views = {"primary": "image", "secondary": "image_additional_view"}
    return Made(vector(action, state), moving(OPEN_THEN_CLOSED), expected, views, VECTOR)


def furniture() -> Made:
    state = ramp(35)
    action = columns(every(XYZ), every(QUARTER), SIGNED)
    expected = columns(state[:, :7], state[:, 34])
    return Made(vector(action, state), TURNED, expected, IMAGE_AND_WRIST, VECTOR)


def pickup() -> Made:
    state = ramp(20)
    action = columns(every(XYZ), every(QUARTER), np.float32(OPEN_THEN_CLOSED))
    return Made(vector(action, state), TURNED, state[:, :8], IMAGE_AND_WRIST, VECTOR)


def kitchen() -> Made:
    state = ramp(21)
    fields = vector(columns(moving(OPEN_THEN_CLOSED), ramp(1, 9.0)), state)  # the last dimension ends the episode
    expected = columns(state[:, :7], np.zeros(T))
    return Made(fields, moving(OPEN_THEN_CLOSED), expected, {"primary": "image"}, VECTOR)


def edan() -> Made:
    state = ramp(7)
    fields = vector(columns(every(MOVE), CLOSED), state)
    return Made(fields, moving(OPEN_THEN_CLOSED), columns(state, np.zeros(T)), {"primary": "image"}, VECTOR)


def fanuc() -> Made:
    state = columns(ramp(6), CLOSED, ramp(6, 20.0))
    fields = vector(every(MOVE), state)
    expected = columns(state[:, :6], np.zeros(T), CLOSED)
    return Made(fields, moving(OPEN_THEN_CLOSED), expected, IMAGE_AND_WRIST, VECTOR)


def stretch() -> Made:
    state = ramp(4)
    fields = vector(columns(moving(OPEN_THEN_CLOSED), ramp(1, 9.0)), state)
    expected = columns(state[:, :3], np.zeros((T, 4)), state[:, 3])
    return Made(fields, moving(OPEN_THEN_CLOSED), expected, {"primary": "image"}, VECTOR)


def d3field() -> Made:
    fields = {"action": every(XYZ), "observation/state": ramp(4)}
    actions = columns(every(XYZ), np.zeros((T, 4)))
    return Made(fields, actions, np.zeros((T, 8)), {"primary": "image_1", "secondary": "image_2"}, VECTOR)


def dobbe() -> Made:
    fields = vector(moving(OPEN_THEN_CLOSED), POSITIONS)
    return Made(fields, moving(OPEN_THEN_CLOSED), POSITIONS, {"primary": "wrist_image"}, VECTOR)


def fmb() -> Made:
    pose, gripper = ramp(7), ramp(1, 9.0)
    fields = {
        "action": moving(OPEN_THEN_CLOSED),
        "observation/eef_pose": pose,
        "observation/state_gripper_pose": gripper[:, 0],
    }
    views = {"primary": "image_side_1", "secondary": "image_side_2", "wrist": "image_wrist_1"}
    return Made(fields, moving(OPEN_THEN_CLOSED), columns(pose, gripper), views, VECTOR)


def fractal() -> Made:
    pose, gripper = ramp(7), ramp(1, 9.0)
    fields = rt_x(CLOSES[:, None]) | {
        "observation/base_pose_tool_reached": pose,
        "observation/gripper_closed": gripper,
    }
    return Made(fields, moving(OPEN_THEN_CLOSED), columns(pose, gripper), {"primary": "image"})


def roboturk() -> Made:
    return Made(rt_x(SIGNED[:, None]), moving(OPEN_THEN_CLOSED), np.zeros((T, 8)), {"primary": "front_rgb"})


def doors() -> Made:
    """The only camera is on the wrist."""
    return Made(rt_x(CLOSES[:, None]), moving(OPEN_THEN_CLOSED), np.zeros((T, 8)), {"wrist": "image"})


MADE = {
    **{f"libero_{suite}_no_noops": libero for suite in ("spatial", "object", "goal", "10")},
    "bridge_orig": bridge_orig,
    "bridge_dataset": bridge_orig,
    "bridge_oxe": bridge_oxe,
    "droid": droid,
    "fractal20220817_data": fractal,
    "kuka": zlib_state,
    "taco_play": taco,
    "jaco_play": jaco,
    "berkeley_cable_routing": cables,
    "roboturk": roboturk,
    "nyu_door_opening_surprising_effectiveness": doors,
    "viola": viola,
    "berkeley_autolab_ur5": ur5,
    "toto": toto,
    "bc_z": bc_z,
    "language_table": language_table,
    HYDRA: hydra,
    "austin_buds_dataset_converted_externally_to_rlds": lambda: robomimic(ramp(24)),
    "austin_sailor_dataset_converted_externally_to_rlds": lambda: robomimic(ramp(8)),
    "austin_sirius_dataset_converted_externally_to_rlds": lambda: robomimic(ramp(8)),
    "utaustin_mutex": lambda: robomimic(ramp(24)),
    FRANKA_PLAY: franka_play,
    FURNITURE: furniture,
    PICKUP: pickup,
    "fmb_dataset": fmb,
    "ucsd_kitchen_dataset_converted_externally_to_rlds": kitchen,
    "dlr_edan_shared_control_converted_externally_to_rlds": edan,
    "berkeley_fanuc_manipulation": fanuc,
    "cmu_stretch": stretch,
    "uiuc_d3field": d3field,
    "dobbe": dobbe,
}


def read(root: Path, name: str, made: Made) -> DemoSet:
    """Write a shard of the schema, and read it as demonstrations with all its views."""
    fields = dict(made.fields)
    if made.instruction not in fields:
        fields[made.instruction] = [TEXT] * T
    for order, image in enumerate(made.views.values()):
        fields[f"observation/{image}"] = frames(T, 40 + 50 * order)
    write_dataset(root, name, [fields])
    config = DemoConfig(views=tuple(made.views))
    return RldsSource(config, str(root), len(made.views)).collect(lambda text: None)


def test_every_ready_mapping_is_tested():
    assert set(MADE) == set(READY)


@pytest.mark.parametrize("name", MADE)
def test_a_dataset_is_standardised_by_its_own_convention(tmp_path, name):
    made = MADE[name]()
    demos = read(tmp_path, name, made)
    np.testing.assert_allclose(demos.actions, made.actions, atol=2e-6)  # float32; differences of a state up to 7
    np.testing.assert_allclose(demos.proprio, made.state, rtol=1e-6)
    assert demos.actions.dtype == demos.proprio.dtype == np.float32
    assert demos.instructions == (TEXT.decode(),) and demos.name == name.removesuffix("_no_noops")
    for row, step in enumerate(made.steps):
        for order in range(len(made.views)):
            assert demos.images[row][order].max() == demos.images[row][order].min() == 40 + 50 * order + step
    assert demos.action_mask == (True,) * 6 + (False,)


@pytest.mark.parametrize("name", MADE)
def test_an_inspection_shows_the_statistics_that_finetune_would_use(tmp_path, name):
    demos = read(tmp_path, name, MADE[name]())
    summary = summarize(RldsDataset(tmp_path))
    assert summary.convention == "as a policy gives them"
    assert summary.statistics == dataset_statistics(demos.actions, demos.proprio, 1, demos.action_mask)


def test_an_inspection_says_that_no_mapping_fits(tmp_path):
    fields = {"action": every(MOVE), "observation/state": ramp(8), "language_instruction": [TEXT] * T}
    write_dataset(tmp_path, "bridge_orig", [fields | {"observation/state": ramp(3)}])
    summary = summarize(RldsDataset(tmp_path))
    assert summary.convention == "as recorded, because no ready mapping fits the fields"
    assert summary.statistics is not None and summary.statistics["action"]["mean"] == pytest.approx(MOVE.tolist())


def test_other_names_have_the_layout_of_a_recording():
    assert ready_mapping("libero_spatial") == READY["libero_spatial_no_noops"]
    assert ready_mapping("my_robot").action_mask(7) is None
