"""Checks of what an environment shows: its suite, images, proprio and instruction."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from vlarl.config.words import counted
from vlarl.envs.check.findings import Findings, Subject, breach, note, passed


def suite(subject: Subject) -> Findings:
    """The tasks and states that the environment declares."""
    spec = subject.spec
    wrong = []
    if [task.task_id for task in spec.tasks] != list(range(len(spec.tasks))) or not spec.tasks:
        wrong.append(breach("suite: task ids don't count from 0", "number the tasks 0, 1, 2 … in their order"))
    if not spec.train_states or not spec.eval_states:
        wrong.append(breach("suite: no initial states to train or to evaluate on", "give both some; gym.num_states"))
    if both := sorted(set(spec.train_states) & set(spec.eval_states)):
        wrong.append(breach(f"suite: states {both} are for training and evaluation", "keep the two apart"))
    for task in spec.tasks:
        if not task.instruction.strip():
            remedy = "set one, such as with gym.instructions; it is all that a policy knows of its task"
            wrong.append(breach(f"suite: task {task.task_id} has no instruction", remedy))
    states = f"{counted(len(spec.train_states), 'state')} to train on and {len(spec.eval_states)} to evaluate on"
    tasks = "one task" if len(spec.tasks) == 1 else f"{len(spec.tasks)} tasks"
    yield from wrong or [passed(f"suite: {tasks}, {states}")]


def first_look(subject: Subject) -> Findings:
    """The precondition of all other checks: the environment starts and returns arrays of the promised kind."""
    subject.env.reset(subject.task())
    seen = subject.env.observe()
    for name, array, dtype, shape in (
        ("images", seen.images, np.dtype(np.uint8), subject.image_shape),
        ("proprio", seen.proprio, np.dtype(np.float32), (subject.spec.proprio_dim,)),
    ):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            remedy = "convert it in observe(), or promise what it is in the factory's image_shape and spec"
            yield breach(f"first look: {name} are {found}, not {dtype}{list(shape)} as promised", remedy)
        else:
            yield passed(f"{name}: {array.dtype}{list(array.shape)}")


def images(subject: Subject) -> Findings:
    """The images of the cameras."""
    subject.env.reset(subject.task())
    seen, frame = subject.env.observe(), subject.env.frame()
    wrong = []
    for index, view in enumerate(seen.images):
        if view.max() == 1:
            remedy = "fractions were cast to whole numbers: multiply by 255 first"
            wrong.append(breach(f"images: view {index} holds nothing but 0 and 1", remedy))
        elif view.std() < 1.0:
            remedy = "does the camera look at the scene, and is it rendered before it is read?"
            wrong.append(breach(f"images: view {index} is of one colour", remedy))
    for a, b in combinations(range(len(seen.images)), 2):
        if np.array_equal(seen.images[a], seen.images[b]):
            wrong.append(breach(f"images: views {a} and {b} are the same", "name a camera for each"))
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        found = f"{frame.dtype}{list(frame.shape)}"
        wrong.append(breach(f"images: frame() returns {found}, and video frames are uint8[H, W, 3]", "convert it"))
    yield from wrong or [passed("images: each view shows something, and no two show the same")]
    yield note("images: check yourself that they are upright and in the right colours")


def proprio_and_instruction(subject: Subject) -> Findings:
    """The robot's state and its instruction."""
    subject.env.reset(subject.task())
    seen = subject.env.observe()
    if not np.isfinite(seen.proprio).all():
        indices = np.flatnonzero(~np.isfinite(seen.proprio)).tolist()
        yield breach(
            f"proprio: dimensions {indices} are not finite", "a policy can't be trained on them: leave them out"
        )
    elif not seen.proprio.any():
        yield note("proprio: all zeros; a policy that reads the robot's state gets no information from it")
    else:
        yield passed("proprio: finite values")
    if not isinstance(seen.instruction, str) or not seen.instruction.strip():
        yield breach(f"instruction: is {seen.instruction!r}", "give the task's sentence in every observation")
    else:
        yield passed(f"instruction: {seen.instruction!r}")
