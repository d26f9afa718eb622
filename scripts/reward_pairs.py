#!/usr/bin/env python
"""Makes pairs of responses for the preset prompts_reward: rows in TRL's columns, and images, of `prompts_shapes`.

    python scripts/reward_pairs.py pairs [--prompts 400] [--seed 0]

Each kind of prompt has as many rows. The chosen response is the solution, the rejected one another solution of that
kind, so that only the image says which is right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from vlarl.envs.prompts.shapes import COLOURS, INSTRUCTIONS, MOST, ShapePrompts
from vlarl.types import Prompt

WORDS = (tuple(COLOURS), ("left", "right"), ("above", "below"), tuple(str(count) for count in range(1, MOST + 1)))
LARGEST = 99  # of the integers that are read


def other_solution(prompt: Prompt, rng: np.random.Generator) -> str:
    """A wrong solution of the same kind."""
    solution, kind = str(prompt.columns["solution"]), prompt.columns["kind"]
    if kind == "digits":
        wrong = [str(number) for number in range(LARGEST + 1) if str(number) != solution]
    elif kind == "compare":
        wrong = [colour for colour in COLOURS if colour in prompt.text and colour != solution]
    else:
        wrong = [word for words in WORDS if solution in words for word in words if word != solution]
    return str(rng.choice(wrong))


def write_pairs(folder: Path, prompts: int, seed: int) -> Path:
    """Write `prompts` rows of each kind; returns the file."""
    source, rng = ShapePrompts(), np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for task in range(len(INSTRUCTIONS)):
        for state in rng.choice(source.spec.train_states, prompts, replace=False):
            prompt = source.prompt(task, int(state))
            name = f"images/{prompt.columns['kind']}_{state:05d}.png"
            Image.fromarray(prompt.images[0]).save(folder / name)
            row = {"prompt": [{"role": "user", "content": prompt.text}], "image": name}
            answers = {"chosen": str(prompt.columns["solution"]), "rejected": other_solution(prompt, rng)}
            rows.append(row | {key: [{"role": "assistant", "content": text}] for key, text in answers.items()})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def main() -> None:
    """Read the options and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=400, help="rows of each of the five kinds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(write_pairs(options.folder, options.prompts, options.seed))


if __name__ == "__main__":
    main()
