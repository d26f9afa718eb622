"""Small LeRobot datasets."""

from pathlib import Path

import numpy as np

from vlarl.data.lerobot.declared import Declared
from vlarl.data.lerobot.info import Feature
from vlarl.data.lerobot.reader import LeRobotDataset
from vlarl.data.lerobot.writer import LeRobotWriter

IMAGE, WRIST = "observation.images.image", "observation.images.wrist_image"
TASKS = ("open the drawer", "close it", "open the drawer")
LENGTHS = (5, 3, 4)


def episode(index: int, size: int = 16) -> tuple[dict, dict, list[str], dict]:
    """The arguments of LeRobotWriter.add: smooth frames that differ from step to step."""
    random = np.random.default_rng(index)
    length = LENGTHS[index]
    y, x, t = np.meshgrid(np.arange(size), np.arange(size), np.arange(length), indexing="ij")
    shade = (40 * index + 8 * t + 4 * y + 3 * x).transpose(2, 0, 1)
    frames = np.stack([shade, shade // 2, 255 - shade], axis=-1).astype(np.uint8)
    values = {
        "observation.state": random.standard_normal((length, 8)).astype(np.float32),
        "action": np.concatenate(
            [random.uniform(-1, 1, (length, 6)), random.choice([-1, 1], (length, 1))], axis=1
        ).astype(np.float32),
        "next.success": np.arange(length) == (length - 1 if index != 1 else -1),
        "phase": [f"phase {step}" for step in range(length)],
        "one": random.standard_normal((length, 1)),
    }
    cameras = {IMAGE: frames, WRIST: frames[:, ::-1].copy()}
    return values, cameras, [TASKS[index]] * length, {"file_path": f"episode {index}", "score": np.float32(index / 3)}


def features(frames: str = "image", size: int = 16) -> dict[str, Feature]:
    image = Feature(frames, (size, size, 3), ["height", "width", "channels"])
    return {
        IMAGE: image,
        WRIST: image,
        "observation.state": Feature("float32", (8,), [f"s{i}" for i in range(8)]),
        "action": Feature("float32", (7,), [f"a{i}" for i in range(7)]),
        "next.success": Feature("bool", (1,)),
        "phase": Feature("string", (1,)),
        "one": Feature("float64", (1,), ["one"]),
    }


def write(
    folder: Path, frames: str = "image", gripper: str | None = "closed_is_1", **options: object
) -> LeRobotDataset:
    declared = Declared("libero_spatial", gripper)
    with LeRobotWriter(folder, features(frames), 10, declared, **options) as writer:
        for index in range(len(LENGTHS)):
            writer.add(*episode(index))
    return LeRobotDataset(folder)
