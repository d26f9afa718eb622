"""Recorded episodes as demonstrations: values are read at once, frames when a batch needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vlarl.config.finetune import DemoConfig
from vlarl.config.words import counted
from vlarl.data.conventions import policy_actions
from vlarl.data.demo_set import DemoSet
from vlarl.data.rlds.features import UNKNOWN
from vlarl.data.rlds.reader import FEATURES, STEPS, Episode, RldsDataset
from vlarl.data.rlds.writer import CAMERAS, OBSERVATION
from vlarl.data.tabletop_demos import TABLETOP
from vlarl.envs.tabletop.tasks import SUITES as TABLETOP_SUITES
from vlarl.errors import UsageError
from vlarl.observability.machine import available_cores
from vlarl.types import FloatArray, IntArray, UInt8Array

ACTION, STATE, INSTRUCTION = f"{STEPS}action", f"{OBSERVATION}state", f"{STEPS}language_instruction"
TERMINAL = f"{STEPS}is_terminal"
NO_NOOPS = "_no_noops"  # suffix of the names of LIBERO's data without idle steps


class RldsFrames:
    """Frames of a dataset, decoded when they are read."""

    def __init__(
        self, episodes: Sequence[Episode], cameras: Sequence[str], size: tuple[int, ...], steps: IntArray
    ) -> None:
        self._episodes, self._cameras, self._size, self._steps = episodes, cameras, size, steps  # [N, 2]: episode, step
        self.shape = (len(steps), len(cameras), *size)

    def __getitem__(self, index: int) -> UInt8Array:
        episode, step = self._steps[index]
        return np.concatenate([self._episodes[episode].images(camera, [step]) for camera in self._cameras])

    def select(self, rows: IntArray) -> RldsFrames:
        """Some of the frames."""
        return RldsFrames(self._episodes, self._cameras, self._size, self._steps[rows])


class RldsSource:
    """A recorded dataset, in as many of its views as a policy reads."""

    def __init__(self, config: DemoConfig, path: str, num_images: int, option: str = "demos.path") -> None:
        """`option` names the path in messages."""
        self._option = option
        self.dataset = RldsDataset(path)
        self.suite = self.dataset.name.removesuffix(NO_NOOPS)
        self.name = TABLETOP if self.suite in TABLETOP_SUITES else self.suite
        self.only_successful = bool(config.only_successful)
        fields = self.dataset.fields
        wanted = [ACTION, STATE, INSTRUCTION, *(f"{OBSERVATION}{camera}" for camera in CAMERAS[:num_images])]
        if missing := [name for name in (*wanted, TERMINAL) if name not in fields]:
            raise UsageError(
                f"{option}: {self.dataset.folder} lacks {', '.join(missing)}; it has {', '.join(fields)}. Record it "
                "in the layout of docs/data.md, or set policy.num_images to the views that it has."
            )
        self._cameras = wanted[3:]
        self._check_shapes()
        self.action_dim, self.proprio_dim = fields[ACTION].shape[0], fields[STATE].shape[0]

    def _check_shapes(self) -> None:
        fields = self.dataset.fields
        wanted = {ACTION: ("tensor", 1), STATE: ("tensor", 1), INSTRUCTION: ("text", 0), TERMINAL: ("tensor", 0)}
        for name, (kind, rank) in {**wanted, **dict.fromkeys(self._cameras, ("image", 3))}.items():
            if (field := fields[name]).kind != kind or len(field.shape) != rank or UNKNOWN in field.shape:
                raise UsageError(
                    f"{self._option}: {self.dataset.folder / FEATURES} describes {name} as {field.kind} "
                    f"{list(field.shape)}, but demonstrations have {kind} of {rank} known sizes there. Record it in "
                    "the layout of docs/data.md."
                )

    def collect(self, note: Callable[[str], None]) -> DemoSet:
        """Read the values of all episodes; frames stay on the disk."""
        note(f"reading {counted(len(self.dataset), 'episode')} of {self.dataset.name}")
        with ThreadPoolExecutor(available_cores()) as pool:
            episodes = list(pool.map(self.dataset.__getitem__, range(len(self.dataset))))
        texts = [episode.texts(INSTRUCTION)[0] for episode in episodes]
        instructions = tuple(dict.fromkeys(texts))
        lengths = np.array([len(episode) for episode in episodes], np.int64)
        steps = np.stack([np.repeat(np.arange(len(lengths)), lengths), np.concatenate([*map(np.arange, lengths)])], 1)
        height, width, _ = self.dataset.fields[self._cameras[0]].shape
        return DemoSet(
            name=self.name,
            images=RldsFrames(episodes, self._cameras, (height, width, 3), steps),
            proprio=np.concatenate([episode.values(STATE) for episode in episodes]),
            actions=policy_actions(self.name, _actions(episodes)),
            instruction_ids=np.repeat([instructions.index(text) for text in texts], lengths),
            instructions=instructions,
            episode_lengths=lengths,
            success=np.array([reached_goal(episode) for episode in episodes]),
        )


def reached_goal(episode: Episode) -> bool:
    """Whether an episode's last step is terminal, rather than cut off by a time limit."""
    return bool(np.all(episode.values(TERMINAL)[-1]))


def _actions(episodes: Sequence[Episode]) -> FloatArray:
    actions: FloatArray = np.concatenate([episode.values(ACTION) for episode in episodes])
    return actions
