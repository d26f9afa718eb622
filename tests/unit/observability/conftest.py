"""A synthetic run, as training would leave it, for the tests of what reads runs."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vlarl.config.training_data import TrainingData, write_training_data
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.sinks import JsonlSink
from vlarl.rollout.recorder import EpisodeRecorder
from vlarl.types import EpisodeResult, Task

ITERATIONS = 20
BEFORE, AFTER = 97, 186  # successes of 200
INSTRUCTIONS = [
    "pick up the red block and place it on the plate",
    "put the mug left of the bowl <next to> the plate",
    "move the yellow block between the mug and the bowl to the tray",
    "pick up the bowl from the table center and place it on the plate",
    "push the cream cheese to the front of the stove",
    "put the wine bottle on top of the cabinet",
    "place the green block on the far corner of the tray",
    "put the blue cube into the basket",
    "stack the red block on the green block",
    "put the mug on the coaster",
]


def _frames(success: bool) -> tuple[np.ndarray, ...]:
    """A square travels over a table towards a disc, and reaches it or not."""
    size, frames = 256, []
    rows, columns = np.mgrid[0:size, 0:size]
    for step in range(30):
        fraction = step / 29 * (1.0 if success else 0.55)
        image = np.stack([205 - rows / 8, 186 - rows / 9, 160 - rows / 10], axis=-1)
        image[(rows - 170) ** 2 + (columns - 200) ** 2 < 900] = (236, 232, 224)
        x, y = int(40 + 160 * fraction), int(70 + 100 * fraction)
        image[y - 14 : y + 14, x - 14 : x + 14] = (196, 62, 52)
        frames.append(image.astype(np.uint8))
    return tuple(frames)


def _evaluation(won: int, recorded: int) -> list[EpisodeResult]:
    order = list(range(200))
    random.Random(3).shuffle(order)
    successes = set(order[:won])
    return [
        EpisodeResult(
            Task("tabletop_spatial", i % 10, 30 + i // 10, seed=i),
            INSTRUCTIONS[i % 10],
            i in successes,
            40,
            float(i in successes),
            _frames(i in successes) if i < recorded else (),
        )
        for i in range(200)
    ]


def _metrics(i: int) -> dict[str, float]:
    noise = random.Random(i)
    success = 0.42 + 0.5 * (1 - math.exp(-i / 6)) + noise.uniform(-0.03, 0.03)
    return {
        "rollout/success_rate": success,
        "rollout/mean_return": success,
        "rollout/mean_length": 78 - 30 * success + noise.uniform(-2, 2),
        "rollout/env_steps_per_s": 2300 + noise.uniform(-150, 150),
        "train/entropy": 1.9 * math.exp(-i / 25) + noise.uniform(-0.03, 0.03),
        "train/approx_kl": 0.004 + noise.uniform(-0.002, 0.003),
        "train/clipfrac": 0.06 + noise.uniform(-0.02, 0.03),
        "train/grad_norm": math.nan if i == 7 else 0.8 + noise.uniform(-0.3, 0.5),
        "time/iteration": 15.0,
    }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Make a run that stopped after some iteration, with videos of some episodes at each end."""

    def make(state: str = "finished", last: int = ITERATIONS, videos: int = 2) -> RunDirectory:
        run = RunDirectory.create(tmp_path / "runs", "tabletop_grpo-seed0")
        run.config_file.write_text(
            "run:\n  seed: 0\n  iterations: 20\nenv:\n  suite: tabletop_spatial\n"
            "policy:\n  path: builtin:tiny-oft\nalgorithm:\n  name: grpo\n"
        )
        sink, recorder = JsonlSink(run.metrics_file), EpisodeRecorder(run)
        for i in range(last + 1):
            row = _metrics(i) if i else {}
            if i % 5 == 0:
                fraction = i / ITERATIONS
                episodes = _evaluation(round(BEFORE + (AFTER - BEFORE) * fraction**0.5), videos if i in (0, 20) else 0)
                recorder.record(i, "eval", episodes)
                recorder.write_videos(i, episodes)
                row["val/success_rate"] = sum(e.success for e in episodes) / len(episodes)
            sink.write(i, row)
        sink.close()
        recorder.close()
        (run.checkpoints / "final").mkdir()
        write_training_data(run.checkpoints / "final", TrainingData())
        run.write_status(state, last, ITERATIONS, "" if state == "finished" else "stopped by Ctrl-C")  # type: ignore[arg-type]
        return run

    return make
