"""How many images a second `policy.process` prepares, with one thread and with several. Prints a table.

    python benchmarks/images.py [--rows 64] [--threads 1 2 4 8]

256 pixels from the camera, 224 for the model, as with the published checkpoints: by their own preprocessor (bicubic),
and as in LIBERO evaluations (JPEG, Lanczos, crop). Images are smooth with some noise: JPEG takes longer on pure noise.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch

from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.processor import Processor
from vlarl.policies.tiny import init_tiny
from vlarl.types import Observation

CAMERA, MODEL = 256, 224
PIPELINES = {
    "bicubic": ImagePipeline(),
    "JPEG, Lanczos, crop": ImagePipeline(jpeg=True, resize="lanczos3", center_crop=True),
}


def observation(seed: int) -> Observation:
    """An image of smooth gradients with a little noise, and a robot's state."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 3, CAMERA), np.linspace(0, 3, CAMERA))
    waves = np.stack([np.sin(across * f + down * g) for f, g in rng.uniform(0.5, 4, (3, 2))], axis=-1)
    image = (127 + 100 * waves + rng.normal(0, 6, waves.shape)).clip(0, 255).astype(np.uint8)
    return Observation(image[None], rng.uniform(-1, 1, 8).astype(np.float32), "pick up the red cube")


def milliseconds(processor: Processor, observations: list[Observation], repeats: int = 5) -> float:
    """Of one row; the best of the repeats."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        processor(observations)
        times.append(time.perf_counter() - begin)
    return 1000 * min(times) / len(observations)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    policy = init_tiny()
    towers = tuple(replace(tower, image_size=MODEL) for tower in policy.config.towers)
    config = replace(policy.config, towers=towers)
    observations = [observation(seed) for seed in range(given.rows)]
    print("| images | threads | ms a row | rows/s |\n| --- | --- | --- | --- |")
    for name, pipeline in PIPELINES.items():
        processor = Processor(config, policy.tokenizer, policy.normalizer, pipeline)
        for num_threads in given.threads:
            torch.set_num_threads(num_threads)
            took = milliseconds(processor, observations)
            print(f"| {name} | {num_threads} | {took:.2f} | {1000 / took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
