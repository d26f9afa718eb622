"""How fast recorded episodes are read with both cameras decoded: readers in turn, each in a process of its own.

    .venv/bin/python benchmarks/rlds_reading.py                                        # this reader
    .venv/bin/python benchmarks/rlds_reading.py --old OTHER_CHECKOUT/src               # and that of another checkout
    .venv/bin/python benchmarks/rlds_reading.py --tfds VENV/bin/python --size 256      # and TensorFlow Datasets

TensorFlow Datasets runs in an environment of its own: python -m venv VENV; VENV/bin/pip install tensorflow-cpu
tensorflow-datasets. Its steps are flattened, batched and prefetched, which is faster than a loop over steps. The golden
shards are read by default; --size writes episodes with frames of this many pixels and reads those.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "rlds"

MEASURE = """
import json, sys, time
folder, seconds = sys.argv[1], float(sys.argv[2])
READER
read_all()
steps, wall, cpu = 0, time.perf_counter(), time.process_time()
while time.perf_counter() - wall < seconds:
    steps += read_all()
print(json.dumps({"wall": steps / (time.perf_counter() - wall), "cpu": steps / (time.process_time() - cpu)}))
"""
VLARL = """
from vlarl.data.rlds.reader import RldsDataset
def read_all():
    count = 0
    for episode in RldsDataset(folder):
        for camera in ("image", "wrist_image"):
            episode.images("steps/observation/" + camera)
        episode.values("steps/action"), episode.values("steps/observation/state")
        episode.texts("steps/language_instruction")
        count += len(episode)
    return count
"""
TFDS = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow_datasets as tfds
builder = tfds.builder_from_directory(folder)
def read_all():
    count = 0
    steps = builder.as_dataset(split="train").flat_map(lambda episode: episode["steps"])
    for batch in steps.batch(64).prefetch(2):
        for camera in ("image", "wrist_image"):
            batch["observation"][camera].numpy()
        batch["action"].numpy(), batch["observation"]["state"].numpy(), batch["language_instruction"].numpy()
        count += len(batch["action"])
    return count
"""


def main() -> None:
    """Measure the readers in turn and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="src folder of another checkout")
    parser.add_argument("--tfds", help="Python of an environment with tensorflow-datasets")
    parser.add_argument("--size", type=int, help="write and read frames of this many pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    given = parser.parse_args()
    readers = {"vlarl": (sys.executable, VLARL, str(ROOT / "src"))}
    if given.old:
        readers["old"] = (sys.executable, VLARL, given.old)
    if given.tfds:
        readers["tfds"] = (given.tfds, TFDS, "")
    with tempfile.TemporaryDirectory() as made:
        folder = made_dataset(Path(made), given.size) if given.size else next(GOLDEN.glob("*/*/")).resolve()
        rates: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
        for _ in range(given.rounds):
            for name, reader in readers.items():
                rates[name].append(measure(reader, folder, given.seconds))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {given.rounds} rounds in turn")
    for name, rows in rates.items():
        wall, cpu = (statistics.median(row[clock] for row in rows) for clock in ("wall", "cpu"))
        wall_ratio, cpu_ratio = (
            statistics.median(ours[clock] / theirs[clock] for ours, theirs in zip(rates["vlarl"], rows, strict=True))
            for clock in ("wall", "cpu")
        )
        print(
            f"{name:6} {wall:8.0f} steps/s  {cpu:8.0f} steps per CPU second  vlarl is {wall_ratio:.2f} x in wall time, "
            f"{cpu_ratio:.2f} x in CPU time"
        )


def measure(reader: tuple[str, str, str], folder: Path, seconds: float) -> dict[str, float]:
    """Steps per second of wall and CPU time."""
    python, code, source = reader
    environment = {**os.environ, "PYTHONPATH": source}
    command = [python, "-c", MEASURE.replace("READER", code), str(folder), str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def made_dataset(root: Path, size: int) -> Path:
    """Eight episodes of 60 steps in two views, with gradients and noise as a camera's frames have them."""
    from vlarl.data.rlds.writer import RldsWriter
    from vlarl.envs.base import Demonstration
    from vlarl.types import Task

    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 255, size)
    with RldsWriter(root, "made") as writer:
        for index in range(8):
            smooth = ramp[:, None, None] * 0.5 + ramp[None, :, None] * 0.4
            noise = rng.normal(0, 6, (60, 2, size, size, 3))
            images = np.clip(smooth + noise, 0, 255).astype(np.uint8)
            values = rng.normal(size=(60, 8)).astype(np.float32)
            task = Task("made", 0, index, index)
            writer.add(
                Demonstration(task, "lift", images, values, values[:, :7], np.zeros(60, np.float32), success=True)
            )
    return writer.folder


if __name__ == "__main__":
    main()
