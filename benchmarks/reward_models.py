"""Trains reward models and a policy on one alone, for the figures of docs/rewards.md.

    python benchmarks/reward_models.py pairs OUT [--seeds 0 1]      pairs of responses to built-in prompts
    python benchmarks/reward_models.py episodes OUT [--seeds 0]     recorded tabletop episodes, then a policy

Each part runs the commands of vlarl, which it prints, and ends with a table. `episodes` trains the policy of the preset
tabletop_grpo twice, for 5 iterations: with the trained reward model as its only reward, and with one that is not
trained. Success is what the evaluations of these runs measure on initial states that are not trained on. The preset's
algorithm.verifier_gamma is 1 here: below it short episodes are worth more, and on the tabletop those are successes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

FLAWS = ("--close-high", "0.25", "--release-early", "0.3", "--noise", "0.12")
SUITE = "tabletop_spatial"
POLICY = (
    *("--algorithm.verifier_gamma", "1", "--run.iterations", "5", "--eval.interval", "2"),
    *("--eval.states_per_task", "10", "--checkpoint.interval", "0"),
)


def vlarl(*arguments: str) -> None:
    """Run a command and show it."""
    print("vlarl", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "vlarl", *arguments], check=True)


def agreement(run: Path) -> dict[str, float]:
    """How the final reward model of a run agrees with held-out labels."""
    content = json.loads((run / "checkpoints" / "final" / "reward_model.json").read_text())
    return dict(content["held_out"])


def success(run: Path) -> list[float]:
    """Success of the evaluations of a run, in their order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["val/success_rate"] for row in rows if "val/success_rate" in row]


def pairs(out: Path, seeds: list[int], more: list[str]) -> None:
    """Accuracy on held-out pairs."""
    found = {}
    for seed in seeds:
        folder = out / f"pairs_{seed}"
        script = Path(__file__).parent.parent / "scripts" / "reward_pairs.py"
        subprocess.run([sys.executable, str(script), str(folder), "--seed", str(seed)], check=True)
        where = ("--run.root", str(out), "--run.name", f"reward_pairs_{seed}", "--run.seed", str(seed))
        vlarl("finetune", "prompts_reward", "--reward.path", str(folder / "pairs.jsonl"), *where, *more)
        found[seed] = agreement(out / f"reward_pairs_{seed}")
    for seed, values in found.items():
        print(f"seed {seed}: {values}")


def episodes(out: Path, seeds: list[int], more: list[str]) -> None:
    """AUC on held-out episodes, and the success of a policy that nothing else rewards."""
    data = out / "data"
    if not data.exists():
        how = ("--episodes", "40", "--image-size", "56", "--cameras", "agent", "--keep-failures", *FLAWS)
        vlarl("data", "record", "--suite", SUITE, "--out", str(data), *how)
    found = {}
    for seed in seeds:
        where = ("--run.root", str(out), "--run.seed", str(seed))
        models = {"trained": f"reward_episodes_{seed}", "untrained": f"reward_untrained_{seed}"}
        for kind, name in models.items():
            steps = (
                () if kind == "trained" else ("--optim.steps", "1", "--optim.warmup_steps", "1", "--optim.lr", "1e-9")
            )
            how = ("--demos.path", str(data / SUITE), "--run.name", name, *steps, *more)
            vlarl("finetune", "tabletop_reward", *where, *how)
        for kind, name in models.items():
            reward = ("--reward.source", "model", "--reward.model", str(out / name / "checkpoints" / "final"))
            vlarl("train", "tabletop_grpo", *where, "--run.name", f"policy_{kind}_{seed}", *reward, *POLICY)
            found[kind, seed] = agreement(out / name), success(out / f"policy_{kind}_{seed}")
    for (kind, seed), (values, rates) in found.items():
        print(f"seed {seed}, {kind}: {values}, success {rates}")


def main() -> None:
    """Read the options and run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("pairs", "episodes"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options, more = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"pairs": pairs, "episodes": episodes}[options.part](options.out, options.seeds, more)


if __name__ == "__main__":
    main()
