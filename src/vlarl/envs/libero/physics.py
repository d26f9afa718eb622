"""One LIBERO task without rendering: stock physics, control and goals to the bit, at a fraction of the cost.

Stock LIBERO simulates a control step of 50 ms in 25 substeps. In each, robosuite computes positions, collisions and
velocities three times over (before the controller, in the controller, in the step) and polls some thirty sensors,
cameras among them. Nothing moves between the three, so here they are computed once; every call that affects the
constraint solver stays, because the solver starts from its last solution.

Stock resets leave state of earlier episodes in the model (furniture positions, glowing sites) and in the gripper. Here
an episode begins as in a new simulator, whatever ran before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlarl.envs.libero.models import Scene, SceneReader
from vlarl.envs.mujoco import log_warnings
from vlarl.envs.signals import truth

Float64Array = NDArray[np.float64]

SEEN_SUBSTEP = 23
"""Stock sensors are read once a control step. Two forced readings, in reset and in set_init_state, shift their clock by
two substeps, so the observation after a step is the world at the beginning of its last substep but one."""


class Physics:
    """The simulator of one task. `simulator` is LIBERO's own environment, `model` and `data` are MuJoCo's."""

    def __init__(self, problem_file: Path, scenes: SceneReader) -> None:
        import mujoco

        log_warnings()
        self.simulator = _build(problem_file, scenes)
        self.model: Any = self.simulator.sim.model._model
        self.data: Any = self.simulator.sim.data._data
        self._seen: Any = mujoco.MjData(self.model)  # the world when the sensors were read; its kinematics only
        self._seen_fingers = np.zeros(2)
        robot = self.simulator.robots[0]
        self._arm = _Arm(self.model, self.data, robot)
        self._fingers = robot._ref_gripper_joint_pos_indexes
        self._hand_site = robot.eef_site_id
        self._hand_body = self.model.body(robot.robot_model.eef_name).id
        self._num_substeps = int(self.simulator.control_timestep / self.simulator.model_timestep)

    def reset(self, seed: int, state: Float64Array) -> None:
        """Begin an episode in a state [S]; the seed decides where furniture stands, which the state lacks."""
        from robosuite.utils.errors import RandomizationError

        simulator = self.simulator
        np.random.seed(seed)
        while True:  # LIBERO itself retries, with the next random numbers
            try:
                simulator.reset()
                break
            except RandomizationError:
                continue
        simulator.sim.set_state_from_flattened(state)
        simulator.sim.forward()
        simulator._check_success()
        simulator._post_process()
        self._look()
        self._seen_fingers = self.data.qpos[self._fingers]
        self._arm.begin()

    def step(self, action: Float64Array) -> bool:
        """Run one control step with an action [7] of the simulator; whether the goal is reached.

        Raises RuntimeError if the simulation diverged: MuJoCo then resets itself silently.
        """
        import mujoco

        self.simulator._post_process()  # glowing sites, from the last step: stock images show them one step late
        for substep in range(self._num_substeps):
            mujoco.mj_forward(self.model, self.data)
            if substep == 0:
                self._arm.set_goal(action)
            self._arm.drive(action)
            if substep == SEEN_SUBSTEP:
                self._look()
            mujoco.mj_step2(self.model, self.data)  # the rest of mj_step, after what mj_forward has computed
            if substep == SEEN_SUBSTEP:
                self._seen_fingers = self.data.qpos[self._fingers]
        warnings = mujoco.mjtWarning
        for kind in (warnings.mjWARN_BADQPOS, warnings.mjWARN_BADQVEL, warnings.mjWARN_BADQACC):
            if self.data.warning[kind].number:
                raise RuntimeError(f"MuJoCo gave up the simulation ({kind.name}); the episode can't continue")
        return truth(self.simulator._check_success(), "_check_success() of LIBERO")

    def seen(self) -> Any:
        """MuJoCo's data at the time of the last sensor reading, for images and proprio."""
        return self._seen

    def proprio(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Hand position [3], hand orientation as a quaternion [4] wxyz, finger positions [2], as last read."""
        position = self._seen.site_xpos[self._hand_site].copy()
        return position, self._seen.xquat[self._hand_body].copy(), self._seen_fingers

    def _look(self) -> None:
        import mujoco

        self._seen.qpos[:] = self.data.qpos
        mujoco.mj_kinematics(self.model, self._seen)
        mujoco.mj_comPos(self.model, self._seen)
        mujoco.mj_camlight(self.model, self._seen)


class _Arm:
    """robosuite's operational space controller, fed with quantities that are already computed."""

    def __init__(self, model: Any, data: Any, robot: Any) -> None:
        self._model, self._data, self._robot = model, data, robot
        self._site = robot.eef_site_id
        self._actuators = robot._ref_joint_actuator_indexes
        self._gripper_actuators = robot._ref_joint_gripper_actuator_indexes
        self._lowest, self._highest = robot.torque_limits
        low, high = model.actuator_ctrlrange[self._gripper_actuators].T
        self._gripper_middle, self._gripper_reach = 0.5 * (high + low), 0.5 * (high - low)
        self._jacobian_position = np.zeros((3, model.nv))
        self._jacobian_rotation = np.zeros((3, model.nv))
        self._mass_matrix = np.zeros((model.nv, model.nv))
        self.begin()

    def begin(self) -> None:
        """Use the controller that a reset gave the robot."""
        self._controller = self._robot.controller

    def set_goal(self, action: Float64Array) -> None:
        """Set the hand's target for this control step."""
        self._refresh()
        self._controller.set_goal(action[:6])

    def drive(self, action: Float64Array) -> None:
        """Set the torques of the arm and the force of the gripper for one substep."""
        self._refresh()
        torques = self._controller.run_controller()
        self._data.ctrl[self._actuators] = np.clip(torques, self._lowest, self._highest)
        gripper = self._robot.gripper.format_action(action[6:])
        self._data.ctrl[self._gripper_actuators] = self._gripper_middle + self._gripper_reach * gripper

    def _refresh(self) -> None:
        """The controller's `update`. It skips the first one after a reset, as stock does: see `new_update`."""
        import mujoco

        controller = self._controller
        if not controller.new_update:
            return
        model, data, velocities = self._model, self._data, controller.qvel_index
        # The solver's second solution, from which it starts next time; nothing moved, so the rest is up to date.
        mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_VEL, 1)
        controller.ee_pos = data.site_xpos[self._site].copy()
        controller.ee_ori_mat = data.site_xmat[self._site].reshape(3, 3).copy()
        mujoco.mj_jacSite(model, data, self._jacobian_position, self._jacobian_rotation, self._site)
        controller.ee_pos_vel = np.dot(self._jacobian_position, data.qvel)
        controller.ee_ori_vel = np.dot(self._jacobian_rotation, data.qvel)
        controller.joint_pos = data.qpos[controller.qpos_index]
        controller.joint_vel = data.qvel[velocities]
        controller.J_pos = self._jacobian_position[:, velocities]
        controller.J_ori = self._jacobian_rotation[:, velocities]
        controller.J_full = np.vstack([controller.J_pos, controller.J_ori])
        mujoco.mj_fullM(model, self._mass_matrix, data.qM)
        controller.mass_matrix = self._mass_matrix[velocities, :][:, velocities]
        controller.new_update = False


def _build(problem_file: Path, scenes: SceneReader) -> Any:
    """LIBERO's environment of a problem, as its own wrapper configures it, but without images and sensors."""
    import robosuite
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import get_problem_info

    problem = TASK_MAPPING[get_problem_info(str(problem_file))["problem_name"]]
    # LIBERO compares the class name with the problem name.
    headless = type(problem)(problem.__name__, (_Headless, problem), {"_scenes": scenes})
    np.random.seed(0)
    return headless(
        str(problem_file),
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        initialization_noise=None,
        use_camera_obs=False,
        has_renderer=False,
        has_offscreen_renderer=False,
        hard_reset=False,
    )


class _Headless:
    """Overrides of a LIBERO environment, which is the next base class."""

    model: Any
    robots: Any
    control_freq: float
    initialize_time: Callable[[float], None]
    _scenes: SceneReader
    _scene: Scene

    def _initialize_sim(self, xml_string: str | None = None) -> None:
        from robosuite.utils.binding_utils import MjSim

        self._scene = self._scenes.read(xml_string or self.model.get_xml())
        self.sim = MjSim(self._scene.model)
        self.sim.forward()
        self.initialize_time(self.control_freq)

    def _setup_observables(self) -> dict[str, Any]:
        return {}

    def _reset_internal(self) -> None:
        for part, values in self._scene.original.items():
            getattr(self._scene.model, part)[:] = values
        for _ in range(2):  # as stock does when it builds the model and a renderer; the solver keeps state
            self.sim.forward()
        for robot in self.robots:
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)
        super()._reset_internal()  # type: ignore[misc]
