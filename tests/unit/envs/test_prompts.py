"""Built-in prompts: their solutions are right, they follow from their index, and one text ends an episode."""

import re

import numpy as np
import pytest

from vlarl.config.schema import EnvConfig, GymConfig
from vlarl.envs.base import Record
from vlarl.envs.build import build_pool
from vlarl.envs.prompts.arithmetic import MOST, ArithmeticPrompts, operands
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.shapes import COLOURS, GLYPHS, KINDS, SIZE, ShapePrompts
from vlarl.envs.prompts.source import PromptError
from vlarl.types import Prompt, Task

OPERATIONS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b}


def all_prompts(source, task_id):
    return {state: source.prompt(task_id, state) for state in (*source.spec.train_states, *source.spec.eval_states)}


def test_each_sum_has_its_solution():
    source = ArithmeticPrompts()
    for task_id in range(2):
        for prompt in all_prompts(source, task_id).values():
            a, word, b = re.fullmatch(r"What is (\d+) (\w+) (\d+)\?", prompt.text).groups()
            assert prompt.columns["solution"] == str(OPERATIONS[word](int(a), int(b)))
    for prompt in all_prompts(source, 2).values():
        listed = re.fullmatch(r"Which is the largest of (\d+), (\d+) and (\d+)\?", prompt.text).groups()
        assert int(prompt.columns["solution"]) == sorted(map(int, listed))[-1]
    for prompt in all_prompts(source, 3).values():
        a, b = map(int, re.fullmatch(r"Is (\d+) larger than (\d+)\?", prompt.text).groups())
        assert prompt.columns["solution"] == ("yes" if a > b else "no")


def test_every_choice_of_operands_has_one_index():
    pairs = sorted(tuple(operands(state, 100, 10)) for state in range(MOST))
    assert pairs == [(a, b) for a in range(100) for b in range(10)]
    for sides in ((100, 100), (100, 100, 100)):
        found = {tuple(operands(state, *sides)) for state in range(MOST)}
        assert len(found) == MOST and all(0 <= n < 100 for each in found for n in each)
    with pytest.raises(ValueError, match="states 0 to 999, not 1000"):
        operands(MOST, 100, 10)


def blobs(image: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Colour and pixels [N, 2] of each connected region of one colour."""
    found = []
    for name, colour in COLOURS.items():
        left = {tuple(each) for each in np.argwhere((image == colour).all(axis=-1))}
        while left:
            waiting = [left.pop()]
            region = list(waiting)
            while waiting:
                y, x = waiting.pop()
                near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
                left -= near
                waiting += near
                region += near
            found.append((name, np.array(region)))
    return found


def kind_of(pixels: np.ndarray) -> str:
    """A square fills its box, a triangle half of it, a circle pi quarters."""
    height, width = np.ptp(pixels, axis=0) + 1
    filled = len(pixels) / (height * width)
    return "square" if filled > 0.95 else "circle" if filled > 0.62 else "triangle"


def seen_solution(kind: str, prompt: Prompt) -> str:
    """The solution, found in the pixels."""
    regions = blobs(prompt.images[0])
    if kind == "count":
        return str(len(regions))
    if kind == "colour":
        named = re.search(r"the (\w+)\?", prompt.text)[1]
        return next(colour for colour, pixels in regions if kind_of(pixels) == named)
    if kind == "compare":
        colours = [colour for colour, _ in regions]
        return max(set(colours), key=colours.count)
    first, second = re.search(r"the (\w+) \w+ or \w+(?: of)? the (\w+)\?", prompt.text).groups()
    centres = {kind_of(pixels): (pixels.min(axis=0) + pixels.max(axis=0)) / 2 for _, pixels in regions}
    off = centres[first] - centres[second]
    if "left" in prompt.text:
        return "left" if off[1] < 0 else "right"
    return "above" if off[0] < 0 else "below"


@pytest.mark.parametrize("kind", KINDS[:4])
def test_the_pixels_of_an_image_show_its_solution(kind):
    source, task_id = ShapePrompts(), KINDS.index(kind)
    for state in range(40):
        prompt = source.prompt(task_id, state)
        assert prompt.images[0].shape == (SIZE, SIZE, 3)
        assert seen_solution(kind, prompt) == prompt.columns["solution"], prompt.text


def test_the_pixels_of_digits_show_their_number():
    source = ShapePrompts()
    for state in range(60):
        prompt = source.prompt(KINDS.index("digits"), state)
        lit = np.any([(prompt.images[0] == colour).all(axis=-1) for colour in COLOURS.values()], axis=0)
        rows, columns = np.flatnonzero(lit.any(axis=1)), np.flatnonzero(lit.any(axis=0))
        cut = lit[rows[0] : rows[-1] + 1 : 6, : columns[-1] + 1]
        text = ""
        for digit in prompt.columns["solution"]:
            text += digit
            glyph = np.array([int(bit) for bit in GLYPHS[int(digit)]], bool).reshape(5, 3)
            start = np.flatnonzero(cut.any(axis=0))[0] - 6 * np.flatnonzero(glyph.any(axis=0))[0]
            assert np.array_equal(cut[:, start : start + 18 : 6], glyph), (state, digit)
            cut = cut.copy()
            cut[:, : start + 18] = False
        assert not cut.any(), f"more than {text}"


@pytest.mark.parametrize("source", [ArithmeticPrompts(), ShapePrompts()], ids=lambda s: s.spec.name)
def test_prompts_follow_from_their_index_and_held_out_ones_are_never_trained_on(source):
    assert not set(source.spec.train_states) & set(source.spec.eval_states)
    again = type(source)()

    def content(prompt):
        return prompt.text, b"".join(image.tobytes() for image in prompt.images)

    for task_id in range(len(source.spec.tasks)):
        made = {state: content(prompt) for state, prompt in all_prompts(source, task_id).items()}
        trained = {made[state] for state in source.spec.train_states}
        assert trained.isdisjoint(made[state] for state in source.spec.eval_states)
        assert content(again.prompt(task_id, 7)) == made[7]


def test_a_text_ends_the_episode_and_succeeds_where_it_gives_the_solution():
    pool = build_pool(EnvConfig(suite="prompts_arithmetic"), GymConfig(), 3, 56, "sparse")
    tasks = [Task("prompts_arithmetic", 0, state, 0) for state in (4, 5, 4)]
    seen = pool.reset([0, 1, 2], tasks)
    assert seen[0].images.shape == (0, 1, 1, 3) and not seen[0].proprio.any()
    assert seen[0].instruction == seen[2].instruction == seen[0].prompt.messages[-1]["content"]
    right = seen[0].prompt.columns["solution"]
    outcomes = pool.step_chunk([0, 1, 2], [f"<answer>{right}</answer>", "no idea", f"{right}."])
    assert [o.success for o in outcomes] == [True, False, True]
    assert [o.rewards.tolist() for o in outcomes] == [[1.0], [0.0], [1.0]]
    assert all(o.terminated and not o.truncated and o.num_executed == 1 for o in outcomes)
    with pytest.raises(RuntimeError, match="slot 0 has no prompt"):
        pool.step_chunk([0], ["again"])


def test_actions_of_a_robot_and_tasks_of_another_suite_are_refused():
    pool = PromptPool(ShapePrompts(), 1)
    with pytest.raises(ValueError, match="the task is of tabletop_goal"):
        pool.reset([0], [Task("tabletop_goal", 0, 0, 0)])
    pool.reset([0], [Task("prompts_shapes", 0, 0, 0)])
    with pytest.raises(ValueError, match="takes texts, not actions"):
        pool.step_chunk([0], np.zeros((1, 1, 7), np.float32))


def test_a_last_observation_and_a_kept_episode_have_no_pixels():
    pool = PromptPool(ShapePrompts(), 1)
    (seen,) = pool.reset([0], [Task("prompts_shapes", 0, 0, 0)])
    (outcome,) = pool.step_chunk([0], ["3"])
    assert len(seen.prompt.images) == 1 and outcome.observation.prompt.images == ()
    assert outcome.observation.prompt.columns == seen.prompt.columns
    blank = seen.without_images()
    assert blank.prompt.images == () and blank.prompt.messages == seen.prompt.messages


class Corrupt(ArithmeticPrompts):
    def __init__(self, on_error: str) -> None:
        super().__init__()
        self.on_error = on_error

    def prompt(self, task_id: int, state: int) -> Prompt:
        if state == 1:
            raise PromptError("train.jsonl, row 1: its image is corrupt.")
        return super().prompt(task_id, state)


def test_a_prompt_that_can_not_be_used_ends_the_run_or_is_an_error_of_its_episode():
    tasks = [Task("prompts_arithmetic", 0, state, 0) for state in (0, 1)]
    with pytest.raises(PromptError, match="row 1: its image is corrupt"):
        PromptPool(Corrupt("stop"), 2).send_reset([0, 1], tasks)
    pool = PromptPool(Corrupt("skip"), 2)
    pool.send_reset([0, 1], tasks, record=Record(frozenset([0, 1])))
    (_, first), (_, second) = pool.receive()
    assert first.error is None and first.frames[0].shape == (256, 256, 3)
    assert second.error == "train.jsonl, row 1: its image is corrupt." and not second.frames
