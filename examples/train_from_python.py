"""Train from Python: your own reward, a callback per iteration and one per episode.

    python examples/train_from_python.py          # two short iterations: half a minute on two CPU cores
    python examples/train_from_python.py --full   # the preset's own length

The same from the command line: `vlarl train tabletop_grpo --reward.source my_module:quick`.
"""

import sys
from collections import Counter

import vlarl

SHORT = {
    "run.iterations": 2,
    "policy.path": "builtin:tiny-oft",  # four actions at once: the faster of the two built-in policies
    "env.task_ids": [3, 4],
    "rollout.num_groups": 4,
    "rollout.group_size": 4,
    "eval.states_per_task": 2,
    "eval.videos": 1,
}


def quick(trajectory: vlarl.Trajectory) -> float:
    """Reward early success more than late success."""
    return 1.0 - trajectory.length / 100 if trajectory.success else 0.0


def show(record: vlarl.IterationRecord) -> None:
    """One line per iteration; `record.metrics` has every metric of docs/metrics.md."""
    named = {"success": "rollout/success_rate", "reward": "rollout/mean_return", "evaluated": "val/success_rate"}
    known = [f"{label} {record.metrics[name]:.2f}" for label, name in named.items() if name in record.metrics]
    print(f"iteration {record.iteration}: {', '.join(known)}")


def main() -> None:
    """Train, count the outcomes of each task, and print success before and after."""
    outcomes: Counter[tuple[str, str]] = Counter()

    def count(record: vlarl.EpisodeRecord) -> None:
        outcomes[record.result.instruction, record.result.outcome] += 1

    options = {} if "--full" in sys.argv else SHORT
    summary = vlarl.train("tabletop_grpo", options, reward=quick, on_iteration=show, on_episode=count)
    for (instruction, outcome), episodes in sorted(outcomes.items()):
        print(f"{episodes:4d} x {outcome}: {instruction}")
    print(f"success {summary.success_before:.1%} before, {summary.success_after:.1%} after; {summary.report}")


if __name__ == "__main__":
    main()
