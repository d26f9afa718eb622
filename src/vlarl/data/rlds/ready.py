"""Mappings of the datasets that OpenVLA was trained on, by the names of the datasets.

States are laid out as there, mostly in 8 dimensions: position 3, rotation 3, 0, gripper; position 3, quaternion 4,
gripper; or joints 7, gripper. `zeros` stand where a dataset has nothing.
"""

from __future__ import annotations

from vlarl.data.rlds.mapping import Mapping, parts

NO_NOOPS = "_no_noops"  # suffix of the names of LIBERO's data without idle steps
NATURAL = "observation/natural_language_instruction"
MOVED = ("action/world_vector", "action/rotation_delta")
CLOSING = "action/gripper_closedness_action"
NO_STATE = parts("zeros[8]")
GRIPPER_OF_ROBOMIMIC = "action[-1:] | clip | invert"  # -1 open, 1 closed

RECORDED = Mapping(  # by RldsWriter, in the policy's conventions
    action=parts("action"),
    state=parts("observation/state"),
    primary="observation/image",
    wrist="observation/wrist_image",
    gripper_is_absolute=None,
)
LIBERO = Mapping(
    action=parts("action[0:6]", GRIPPER_OF_ROBOMIMIC),
    state=parts("observation/state"),
    primary="observation/image",
    wrist="observation/wrist_image",
)
LIBERO_SETS = {f"libero_{suite}_no_noops": LIBERO for suite in ("spatial", "object", "goal", "10")}

# Bridge: the first step has no action, and movements are what the arm did, not what it was told to do.
BRIDGE_ORIG = Mapping(
    action=parts("action[0:6]", "action[-1:] | binarise"),
    state=parts("observation/state[0:6]", "zeros[1]", "observation/state[-1:]"),
    primary="observation/image_0",
    secondary="observation/image_1",
    skip_first=1,
    movement_from_state=True,
)
BRIDGE_OXE = Mapping(
    action=parts(*MOVED, "action/open_gripper"),
    state=parts("observation/state[0:6]", "zeros[1]", "observation/state[-1:]"),
    primary="observation/image",
    secondary="observation/image_1",
    instruction=NATURAL,
    skip_first=1,
    movement_from_state=True,
)
DROID = Mapping(
    action=parts("action_dict/cartesian_velocity[0:6]", "action_dict/gripper_position | invert"),
    state=parts("observation/cartesian_position", "observation/gripper_position"),
    primary="observation/exterior_image_1_left",
    wrist="observation/wrist_image_left",
    secondary="observation/exterior_image_2_left",
    noops="motionless",
)
LARGE = {"bridge_orig": BRIDGE_ORIG, "bridge_dataset": BRIDGE_ORIG, "bridge_oxe": BRIDGE_OXE, "droid": DROID}

# The datasets of RT-X: actions in a dictionary, and grippers mostly with relative commands.
RT_X = {
    "fractal20220817_data": Mapping(
        action=parts(*MOVED, f"{CLOSING} | absolute"),
        state=parts("observation/base_pose_tool_reached", "observation/gripper_closed"),
        primary="observation/image",
        instruction=NATURAL,
    ),
    "kuka": Mapping(
        action=parts(*MOVED, f"{CLOSING} | absolute"),
        state=parts(
            "observation/clip_function_input/base_pose_tool_reached[0:7] | unzip",
            "observation/gripper_closed[0:1] | unzip",
        ),
        primary="observation/image",
        instruction=NATURAL,
    ),
    "taco_play": Mapping(
        action=parts("action/rel_actions_world[0:6]", "action/rel_actions_world[-1:] | clip"),
        state=parts("observation/robot_obs[0:6]", "zeros[1]", "observation/robot_obs[7:8]"),
        primary="observation/rgb_static",
        wrist="observation/rgb_gripper",
        instruction=NATURAL,
    ),
    "jaco_play": Mapping(
        action=parts("action/world_vector", "zeros[3]", f"{CLOSING} | absolute"),
        state=parts(
            "observation/end_effector_cartesian_pos[0:6]",
            "zeros[1]",
            "observation/end_effector_cartesian_pos[-1:]",
        ),
        primary="observation/image",
        wrist="observation/image_wrist",
        instruction=NATURAL,
    ),
    "berkeley_cable_routing": Mapping(
        action=parts(*MOVED, "zeros[1]"),
        state=parts("observation/robot_state", "zeros[1]"),
        primary="observation/image",
        wrist="observation/wrist45_image",
        secondary="observation/top_image",
        instruction=NATURAL,
    ),
    "roboturk": Mapping(
        action=parts(*MOVED, f"{CLOSING} | clip | invert"),
        state=NO_STATE,
        primary="observation/front_rgb",
        instruction=NATURAL,
    ),
    "nyu_door_opening_surprising_effectiveness": Mapping(
        action=parts(*MOVED, f"{CLOSING} | absolute"),
        state=NO_STATE,
        wrist="observation/image",
        instruction=NATURAL,
    ),
    "viola": Mapping(
        action=parts(*MOVED, f"{CLOSING} | clip | invert"),
        state=parts("observation/joint_states", "observation/gripper_states"),
        primary="observation/agentview_rgb",
        wrist="observation/eye_in_hand_rgb",
        instruction=NATURAL,
    ),
    "berkeley_autolab_ur5": Mapping(
        action=parts(*MOVED, f"{CLOSING} | absolute"),
        state=parts("observation/robot_state[6:14]"),
        primary="observation/image",
        wrist="observation/hand_image",
        instruction=NATURAL,
    ),
    "toto": Mapping(
        action=parts(*MOVED, "action/open_gripper"),
        state=parts("observation/state", "zeros[1]"),
        primary="observation/image",
        instruction=NATURAL,
    ),
    "bc_z": Mapping(
        action=parts(
            "action/future/xyz_residual[0:3]",
            "action/future/axis_angle_residual[0:3]",
            "action/future/target_close[0:1] | invert",
        ),
        state=parts(
            "observation/present/xyz", "observation/present/axis_angle", "zeros[1]", "observation/present/sensed_close"
        ),
        primary="observation/image",
        instruction=NATURAL,
    ),
    "language_table": Mapping(  # pushes on a plane, with a gripper that stays open
        action=parts("action", "zeros[4]", "ones[1]"),
        state=parts("observation/effector_translation", "zeros[6]"),
        primary="observation/rgb",
        instruction="observation/instruction",
    ),
}

# Datasets of Franka arms with an action of one vector.
FRANKA = {
    "stanford_hydra_dataset_converted_externally_to_rlds": Mapping(
        action=parts("action[0:6]", "action[-1:] | invert"),
        state=parts("observation/state[0:3]", "observation/state[7:10]", "zeros[1]", "observation/state[-3:-2]"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "austin_buds_dataset_converted_externally_to_rlds": Mapping(
        action=parts("action[0:6]", GRIPPER_OF_ROBOMIMIC),
        state=parts("observation/state[0:8]"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "austin_sailor_dataset_converted_externally_to_rlds": Mapping(
        action=parts("action[0:6]", GRIPPER_OF_ROBOMIMIC),
        state=parts("observation/state"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "austin_sirius_dataset_converted_externally_to_rlds": Mapping(
        action=parts("action[0:6]", GRIPPER_OF_ROBOMIMIC),
        state=parts("observation/state"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "utaustin_mutex": Mapping(
        action=parts("action[0:6]", GRIPPER_OF_ROBOMIMIC),
        state=parts("observation/state[0:8]"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "nyu_franka_play_dataset_converted_externally_to_rlds": Mapping(
        action=parts("action[-8:-2]", "action[-2:-1] | clip"),
        state=parts("observation/state[-6:]", "zeros[2]"),
        primary="observation/image",
        secondary="observation/image_additional_view",
    ),
    "furniture_bench_dataset_converted_externally_to_rlds": Mapping(
        action=parts("action[0:3]", "action[3:7] | euler", GRIPPER_OF_ROBOMIMIC),
        state=parts("observation/state[0:7]", "observation/state[-1:]"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "iamlab_cmu_pickup_insert_converted_externally_to_rlds": Mapping(
        action=parts("action[0:3]", "action[3:7] | euler", "action[7:8]"),
        state=parts("observation/state[0:8]"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "fmb_dataset": Mapping(
        action=parts("action"),
        state=parts("observation/eef_pose", "observation/state_gripper_pose"),
        primary="observation/image_side_1",
        wrist="observation/image_wrist_1",
        secondary="observation/image_side_2",
    ),
}

# Other arms with an action of one vector.
OTHER_ARMS = {
    "ucsd_kitchen_dataset_converted_externally_to_rlds": Mapping(  # the last dimension ends the episode
        action=parts("action[:-1]"),
        state=parts("observation/state[0:7]", "zeros[1]"),
        primary="observation/image",
    ),
    "dlr_edan_shared_control_converted_externally_to_rlds": Mapping(
        action=parts("action[0:6]", "action[-1:] | invert"),
        state=parts("observation/state", "zeros[1]"),
        primary="observation/image",
    ),
    "berkeley_fanuc_manipulation": Mapping(  # has no gripper command: the state of the gripper stands for it
        action=parts("action", "observation/state[6:7] | invert"),
        state=parts("observation/state[0:6]", "zeros[1]", "observation/state[6:7]"),
        primary="observation/image",
        wrist="observation/wrist_image",
    ),
    "cmu_stretch": Mapping(
        action=parts("action[:-1]"),
        state=parts("observation/state[0:3]", "zeros[4]", "observation/state[-1:]"),
        primary="observation/image",
    ),
    "uiuc_d3field": Mapping(
        action=parts("action", "zeros[4]"),
        state=NO_STATE,
        primary="observation/image_1",
        secondary="observation/image_2",
    ),
    "dobbe": Mapping(
        action=parts("action"),
        state=parts("observation/state"),
        primary="observation/wrist_image",
    ),
}

READY: dict[str, Mapping] = {**LIBERO_SETS, **LARGE, **RT_X, **FRANKA, **OTHER_ARMS}


def ready_mapping(name: str) -> Mapping:
    """The mapping of a dataset by its name; one without a ready mapping has the layout of `vlarl data record`."""
    if name in READY:
        return READY[name]
    return LIBERO if name.startswith("libero") else RECORDED
