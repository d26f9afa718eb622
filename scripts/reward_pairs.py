#!/usr/bin/env python
"""Makes pairs of responses for the preset prompts_reward: rows in TRL's columns, and images, of the built-in prompts.

    python scripts/reward_pairs.py pairs [--prompts 800] [--seed 0]

Each of the nine kinds of prompts_shapes and prompts_arithmetic has as many rows, of prompts that the suites train on.
The chosen response is the solution, the rejected one another solution of that kind.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

from vlarl.envs.prompts.arithmetic import ArithmeticPrompts
from vlarl.envs.prompts.shapes import COLOURS, MOST, ShapePrompts
from vlarl.types import Prompt

WORDS = (tuple(COLOURS), ("left", "right"), ("above", "below"), ("yes", "no"))
COUNTS = range(1, MOST + 1)
NEAR = 10  # how far a wrong integer is off, at most


def other_solution(prompt: Prompt, rng: np.random.Generator) -> str:
    """A wrong solution of the same kind."""
    solution = str(prompt.columns["solution"])
    if not solution.isdigit():
        words = next(words for words in WORDS if solution in words)
        named = [word for word in words if word in prompt.text.lower()]  # of two colours that are compared
        return str(rng.choice([word for word in (named if solution in named else words) if word != solution]))
    if prompt.columns["kind"] == "largest":
        wrong = [number for number in re.findall(r"\d+", prompt.text) if number != solution]
        return str(rng.choice(wrong or [str(int(solution) + 1)]))
    near = COUNTS if prompt.columns["kind"] == "count" else range(int(solution) - NEAR, int(solution) + NEAR + 1)
    return str(rng.choice([number for number in near if number >= 0 and number != int(solution)]))


def write_pairs(folder: Path, prompts: int, seed: int) -> Path:
    """Write `prompts` rows of each kind; returns the file."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for source in (ShapePrompts(), ArithmeticPrompts()):
        for task in range(len(source.spec.tasks)):
            for state in rng.choice(source.spec.train_states, prompts, replace=False):
                prompt = source.prompt(task, int(state))
                row = {"prompt": [{"role": "user", "content": prompt.text}], "kind": prompt.columns["data_source"]}
                for image in prompt.images:
                    row["image"] = f"images/{prompt.columns['kind']}_{state:05d}.png"
                    Image.fromarray(image).save(folder / row["image"])
                texts = {"chosen": str(prompt.columns["solution"]), "rejected": other_solution(prompt, rng)}
                rows.append(row | {key: [{"role": "assistant", "content": text}] for key, text in texts.items()})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def main() -> None:
    """Read the options and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=800, help="rows of each of the nine kinds, at most 800")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(write_pairs(options.folder, options.prompts, options.seed))


if __name__ == "__main__":
    main()
