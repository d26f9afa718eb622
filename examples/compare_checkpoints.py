"""Compare two checkpoints on the same episodes with a paired test.

    python examples/compare_checkpoints.py                                      # the two built-in policies
    python examples/compare_checkpoints.py first-run builtin:tiny-oft           # your own run, and its initial policy

The same from the command line: `vlarl eval FIRST --against SECOND`.
"""

import sys

import vlarl


def main() -> None:
    """Compare the two, task by task."""
    first, second = sys.argv[1:3] if len(sys.argv) > 2 else ("builtin:tiny-oft", "builtin:tiny-openvla")
    comparison = vlarl.compare(first, second, suite="tabletop_goal", tasks=[0, 3], episodes=5)
    theirs = comparison.b.per_task()
    for task, (won, total) in comparison.a.per_task().items():
        print(f"task {task}: A {won} of {total}, B {theirs[task][0]} of {theirs[task][1]}")
    print(comparison.in_words())


if __name__ == "__main__":
    main()
