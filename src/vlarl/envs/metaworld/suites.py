"""Meta-World's benchmarks as suites: the instruction of each task, and its initial states.

Nothing here loads the simulator. A test compares the tables with the package.
"""

from __future__ import annotations

from vlarl.config.metaworld_tasks import METAWORLD_TASKS
from vlarl.envs.base import SuiteSpec, TaskSpec

NUM_STATES = 50
"""Initial states of a task that suites use; as many as Meta-World's benchmarks sample. Larger indices are states as
well, for demonstrations."""

NUM_TRAIN_STATES = 30
"""The first of them; the others are for evaluation."""

MAX_STEPS = 500
"""Meta-World's own time limit."""

INSTRUCTIONS = {
    "assembly-v3": "pick up the ring wrench and put it on the red peg",
    "basketball-v3": "put the basketball into the hoop",
    "bin-picking-v3": "move the green block from the red bin to the blue bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the red button down",
    "button-press-topdown-wall-v3": "press the red button down behind the wall",
    "button-press-v3": "push the red button in",
    "button-press-wall-v3": "push the red button in behind the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine to the green marker",
    "coffee-push-v3": "push the mug under the coffee machine to the green marker",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the ring wrench off the red peg",
    "door-close-v3": "close the door of the safe",
    "door-lock-v3": "lock the door by turning the lock down",
    "door-open-v3": "open the door of the safe",
    "door-unlock-v3": "unlock the door by turning the lock up",
    "hand-insert-v3": "put the gripper into the hole",
    "drawer-close-v3": "close the green drawer",
    "drawer-open-v3": "open the green drawer",
    "faucet-open-v3": "turn the faucet open",
    "faucet-close-v3": "turn the faucet closed",
    "hammer-v3": "hammer the nail into the box",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up to the red marker",
    "peg-insert-side-v3": "put the green peg into the hole from the side",
    "pick-place-wall-v3": "pick up the red cylinder and hold it over the wall at the blue marker",
    "pick-out-of-hole-v3": "pick the red cylinder out of the hole and hold it at the blue marker",
    "reach-v3": "reach the red marker",
    "push-back-v3": "pull the block back to the green marker",
    "push-v3": "push the red cylinder to the green marker",
    "pick-place-v3": "pick up the red cylinder and hold it at the blue marker",
    "plate-slide-v3": "slide the black plate forward into the goal",
    "plate-slide-side-v3": "slide the black plate sideways into the goal",
    "plate-slide-back-v3": "slide the black plate back out of the goal to the red marker",
    "plate-slide-back-side-v3": "slide the black plate sideways out of the goal to the red marker",
    "peg-unplug-side-v3": "pull the plug out of the wall",
    "soccer-v3": "kick the ball into the goal",
    "stick-push-v3": "push the bottle with the blue stick to the green marker",
    "stick-pull-v3": "pull the bottle with the blue stick to the green marker",
    "push-wall-v3": "push the red cylinder around the wall to the green marker",
    "reach-wall-v3": "reach the red marker behind the wall",
    "shelf-place-v3": "put the blue block on the shelf",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block to the right",
    "window-open-v3": "slide the window open",
    "window-close-v3": "slide the window closed",
}
"""The instruction of each environment. Markers that it names are visible in its images."""


def metaworld_spec(suite: str, max_steps: int | None = None) -> SuiteSpec:
    """Tasks and initial states of a Meta-World suite; the time limit is Meta-World's own by default."""
    limit = MAX_STEPS if max_steps is None else max_steps
    return SuiteSpec(
        name=suite,
        tasks=tuple(TaskSpec(i, INSTRUCTIONS[name], limit) for i, name in enumerate(METAWORLD_TASKS[suite])),
        train_states=tuple(range(NUM_TRAIN_STATES)),
        eval_states=tuple(range(NUM_TRAIN_STATES, NUM_STATES)),
        benchmark_states=tuple(range(NUM_STATES)),
        first_fresh_state=NUM_STATES,
    )
