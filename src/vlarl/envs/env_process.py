"""A process that runs one environment: `main()`, with two inherited file descriptors, a connection and shared memory.

    WorkerPool ── Reset, Chunk, Frame, Demonstrate ─────────► worker ──► SingleEnv
               ◄── Reply ────────────────────────────────────
               ◄══ shared memory: images and proprio of the newest observation

The worker handles one message at a time: it receives, executes, replies, and waits for the next. It ends when the
connection closes. It is a new program, not a fork: it inherits no threads, locks or GPU contexts of the trainer, and
does not run a user's script again.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vlarl.envs.base import (
    Demonstration,
    EnvFactory,
    Expert,
    ExpertFlaws,
    FallibleExpert,
    Mistakes,
    SingleEnv,
    started,
)
from vlarl.envs.guardian import end_with_parent
from vlarl.envs.signals import SignalError, UnreadableError, check_observation, check_reward
from vlarl.errors import UsageError, describe_error, excerpt
from vlarl.types import ChunkOutcome, FloatArray, Observation, Task, UInt8Array

PARENT_CHECK_S = 2.0
LENGTH = struct.Struct("!Q")  # in front of every reply: its size in bytes
LONGEST_TRACEBACK = 16_000  # characters
MEAN_PAUSE = 15  # steps that a hesitating expert stands still
IDLE_STEPS = 8  # recorded after an expert has given up, so that a policy learns to stand still


@dataclass(frozen=True)
class Reset:
    """Start a task."""

    task: Task
    record: bool


@dataclass(frozen=True)
class Chunk:
    """Run actions [K, D] up to the first end."""

    actions: FloatArray
    record: bool
    steps: bool = False  # return the observation after each step


@dataclass(frozen=True)
class Frame:
    """Render the current state."""


@dataclass(frozen=True)
class Demonstrate:
    """Let the expert play a task to its end, with its flaws."""

    task: Task
    flaws: ExpertFlaws


Message = Reset | Chunk | Frame | Demonstrate


@dataclass(frozen=True)
class Reply:
    """The result of a message. An observation's arrays are in the shared memory, its instruction is here."""

    content: Any = None  # ChunkOutcome without an observation, an image, or a Demonstration
    instruction: str = ""
    error: str | None = None  # what went wrong, and where: the environment can't be used any more
    refusal: str | None = None  # a message for the user: another attempt would not help
    seconds: float = 0.0  # that the worker spent on the message


def send_reply(connection: Connection, reply: Reply) -> None:
    """Send a reply with its length in front: the trainer reads with a deadline, which `Connection.recv` lacks."""
    content = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    for part in (LENGTH.pack(len(content)), content):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(connection.fileno(), rest) :]


class SharedObservation:
    """One observation in memory that two processes share."""

    def __init__(self, memory: int, image_shape: tuple[int, int, int, int], proprio_dim: int) -> None:
        self._bytes = mmap.mmap(memory, self.size(image_shape, proprio_dim))
        num_image_bytes = int(np.prod(image_shape))
        self._images = np.frombuffer(self._bytes, np.uint8, num_image_bytes).reshape(image_shape)
        offset = _aligned(num_image_bytes)
        self._proprio = np.frombuffer(self._bytes, np.float32, proprio_dim, offset)

    @staticmethod
    def size(image_shape: tuple[int, int, int, int], proprio_dim: int) -> int:
        """Bytes of an observation."""
        return _aligned(int(np.prod(image_shape))) + 4 * proprio_dim

    def write(self, observation: Observation) -> None:
        """Store an observation's arrays; shapes and dtypes other than the factory's are refused."""
        for name, target, array in (
            ("images", self._images, observation.images),
            ("proprio", self._proprio, observation.proprio),
        ):
            if array.shape != target.shape or array.dtype != target.dtype:
                raise ValueError(
                    f"the environment's {name} are {array.dtype}{list(array.shape)}, and its factory promised "
                    f"{target.dtype}{list(target.shape)}"
                )
            np.copyto(target, array)

    def read(self, instruction: str) -> Observation:
        """A copy of the stored observation."""
        return Observation(self._images.copy(), self._proprio.copy(), instruction)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


class EnvRunner:
    """Runs one environment, which is built when first needed, as messages request."""

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory
        self._limits = {
            (suite.name, task.task_id): task.max_steps for suite in factory.spec.suites for task in suite.tasks
        }
        self._env: SingleEnv | None = None
        self._expert: Expert | None = None
        self._num_steps = 0
        self._limit = 0
        self._episode = ""

    @property
    def env(self) -> SingleEnv:
        """The environment."""
        if self._env is None:
            self._env = self._factory.build()
        return self._env

    def handle(self, message: Message) -> ChunkOutcome | UInt8Array | Demonstration:
        """Execute a message; `SignalError` if the environment returned an unusable value."""
        try:
            match message:
                case Reset():
                    return self.reset(message.task, message.record)
                case Chunk():
                    return self.run_chunk(message.actions, message.record, message.steps)
                case Demonstrate():
                    return self.demonstrate(message.task, message.flaws)
                case Frame():
                    return self.env.frame()
        except (SignalError, UnreadableError) as error:
            step = f"in step {self._num_steps}" if self._num_steps else "at the reset"
            raise SignalError(f"{error}, {step} of episode {self._episode}") from error

    def reset(self, task: Task, record: bool) -> ChunkOutcome:
        """Start a task and observe."""
        self._start(task)
        return started(self._observe(), (self.env.frame(),) if record else ())

    def run_chunk(self, actions: FloatArray, record: bool, steps: bool = False) -> ChunkOutcome:
        """Run actions [K, D] up to the first end, and observe once, after the last; with `steps` after each."""
        rewards = np.zeros(len(actions), np.float32)
        frames: list[UInt8Array] = []
        passed: list[Observation] = []
        terminated = truncated = success = False
        num_executed = 0
        for action in actions:
            if steps and num_executed:
                passed.append(self._observe())
            rewards[num_executed], terminated, truncated, success = self._step(action)
            num_executed += 1
            if record:
                frames.append(self.env.frame())
            if terminated or truncated:
                break
        seen = self._observe()
        return ChunkOutcome(
            rewards, num_executed, terminated, truncated, success, seen, tuple(frames), passed=tuple(passed)
        )

    def demonstrate(self, task: Task, flaws: ExpertFlaws) -> Demonstration:
        """Let the expert play a task to its end; its intended actions are kept, noise is added to those executed.

        For a fraction `hesitation` of the time it pauses, as human teleoperators do. An episode in which it made a
        mistake and gave up ends a few steps later.
        """
        self._start(task)
        expert = self._planned(flaws.mistakes(task.seed))
        hesitation = flaws.hesitation
        rng = np.random.default_rng(task.seed)
        seen: list[Observation] = []
        actions: list[FloatArray] = []
        rewards: list[float] = []
        ended = success = False
        pause = idle = 0
        while not ended and idle < IDLE_STEPS:
            seen.append(self._observe())
            if pause == 0 and actions and rng.random() < hesitation / ((1 - hesitation) * MEAN_PAUSE):
                pause = int(rng.integers(1, 2 * MEAN_PAUSE))
            action = expert.act() if pause == 0 else standing_still(actions[-1])
            pause = max(0, pause - 1)
            noise = rng.normal(0.0, flaws.action_noise, action.shape).astype(np.float32)
            noise[-1] = 0.0  # the gripper only opens or closes
            actions.append(action)
            reward, terminated, truncated, success = self._step(action + noise)
            rewards.append(reward)
            ended = terminated or truncated
            idle += isinstance(expert, FallibleExpert) and expert.finished
        return Demonstration.of_steps(task, seen, actions, rewards, success)

    def _planned(self, mistakes: Mistakes) -> Expert:
        """The expert, which has planned the episode that has started, with these mistakes."""
        if self._expert is None:
            self._expert = self._factory.build_expert(self.env)
        self._expert.reset()
        if mistakes:
            if not isinstance(self._expert, FallibleExpert):
                raise UsageError(
                    f"the experts of {self._factory.spec.name} make no mistakes on purpose: leave out the options for "
                    "closing the gripper too high and for releasing too early."
                )
            self._expert.err(mistakes)
        return self._expert

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()

    def _start(self, task: Task) -> None:
        self._num_steps, self._episode = 0, task.episode_id
        self.env.reset(task)
        self._limit = self._limits[task.key]

    def _observe(self) -> Observation:
        seen = self.env.observe()
        check_observation(seen)
        return seen

    def _step(self, action: FloatArray) -> tuple[float, bool, bool, bool]:
        """Reward, terminated, truncated and success of one step, with the suite's time limit applied."""
        self._num_steps += 1
        step = self.env.step(action)
        check_reward(step.reward)
        truncated = not step.terminated and (step.truncated or self._num_steps >= self._limit)
        return step.reward, step.terminated, truncated, step.success


def standing_still(action: FloatArray) -> FloatArray:
    """No movement, and the gripper as it was."""
    return np.concatenate([np.zeros_like(action[:-1]), action[-1:]])


_IN_SHARED_MEMORY = Observation(np.zeros((0, 0, 0, 3), np.uint8), np.zeros(0, np.float32), "")


def to_reply(content: ChunkOutcome | UInt8Array | Demonstration, shared: SharedObservation) -> Reply:
    """The reply to send: an outcome's observation goes through the shared memory."""
    if not isinstance(content, ChunkOutcome):
        return Reply(content)
    shared.write(content.observation)
    return Reply(replace(content, observation=_IN_SHARED_MEMORY), content.observation.instruction)


def from_reply(reply: Reply, shared: SharedObservation) -> ChunkOutcome:
    """A reply's outcome with its observation, on the trainer's side."""
    outcome: ChunkOutcome = reply.content
    return replace(outcome, observation=shared.read(reply.instruction))


def _follow_parent(parent: int) -> None:
    """End with the trainer, however it ends: a simulator that hangs would not notice a closed connection."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def main() -> None:
    """Serve one environment until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and then closes its pool
    logging.basicConfig(level=logging.WARNING)
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    if sys.argv[3] == "1":
        end_with_parent()
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    sys.path[:] = connection.recv()  # the trainer's path comes first: its factory may be in a user's module
    factory: EnvFactory = connection.recv()
    runner = EnvRunner(factory)
    shared = SharedObservation(memory, factory.image_shape, factory.spec.proprio_dim)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            break
        began = time.perf_counter()
        try:
            reply = to_reply(runner.handle(message), shared)
        except UsageError as error:
            reply = Reply(refusal=str(error))
        except SignalError as error:
            reply = Reply(error=str(error))
        except (Exception, SystemExit) as error:  # a process boundary: the trainer gets whatever is raised
            trace = excerpt(traceback.format_exc().strip(), LONGEST_TRACEBACK)
            reply = Reply(error=f"the environment {describe_error(error)}\n{trace}")
        try:
            send_reply(connection, replace(reply, seconds=time.perf_counter() - began))
        except (BrokenPipeError, ConnectionResetError):
            break
    runner.close()
