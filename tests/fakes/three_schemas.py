"""Three datasets of different schemas, for mixtures."""

from pathlib import Path

import numpy as np
from fakes.rlds_shards import frames, write_dataset


def three_schemas(root: Path) -> Path:
    """A Bridge, a Viola and a dataset of one's own, which say the same in three ways: go up and close, or go down."""
    rng = np.random.default_rng(0)
    for name, count in (("bridge_orig", 6), ("viola", 4), ("mine", 3)):
        episodes = []
        for index in range(count):
            up = index % 2 == 0
            move = np.zeros((8, 6), np.float32)
            move[:, 2] = 0.1 if up else -0.1
            move[:, 0] = 0.1 * rng.uniform(-1, 1, 8)
            closed = np.full(8, up, np.float32)
            text = [b"go up" if up else b"go down"] * 8
            image = frames(8, 150 if up else 50, 16, 16)
            state = np.cumsum(np.concatenate([np.zeros((1, 6), np.float32), move[:-1]]), axis=0)
            if name == "bridge_orig":
                fields = {
                    "action": np.concatenate([move, 1 - closed[:, None]], 1),
                    "observation/state": np.concatenate([state, closed[:, None]], 1),
                    "observation/image_0": image,
                    "language_instruction": text,
                }
            elif name == "viola":
                fields = {
                    "action/world_vector": move[:, :3],
                    "action/rotation_delta": move[:, 3:],
                    "action/gripper_closedness_action": 2 * closed - 1,
                    "observation/joint_states": np.concatenate([state, closed[:, None]], 1),
                    "observation/gripper_states": closed[:, None],
                    "observation/agentview_rgb": image,
                    "observation/natural_language_instruction": text,
                }
            else:
                fields = {
                    "command": np.concatenate([closed[:, None], move], 1),
                    "robot": np.concatenate([state, closed[:, None], closed[:, None]], 1),
                    "front": image,
                    "task": text,
                }
            episodes.append(fields)
        write_dataset(root, name, episodes)
    mapping = root / "mine.yaml"
    mapping.write_text(
        "mine:\n  primary: front\n  state: [robot]\n  instruction: task\n"
        '  action: ["command[1:7]", "command[0:1] | invert"]\n'
    )
    return mapping
