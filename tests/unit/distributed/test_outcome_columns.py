"""Outcomes travel by column, and arrive as they were, without their pixels."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from vlarl.distributed.environments import _together
from vlarl.distributed.reading import Outcomes, Seen
from vlarl.distributed.store_size import RowBytes
from vlarl.distributed.stored_rows import StoredObservation
from vlarl.envs.base import started
from vlarl.types import ChunkOutcome, Observation, Prompt, pixel_digest


def outcome(index):
    """An outcome in which no value is that of another index, or of another field."""
    images = np.full((1, 4, 4, 3), index, np.uint8)
    seen = Observation(images, np.arange(8, dtype=np.float32) + index, f"instruction {index}")
    rewards = np.array([index, 0.5], np.float32)
    frames = (np.full((2, 2, 3), index, np.uint8),) if index == 1 else ()
    return ChunkOutcome(rewards, index + 1, index == 0, index == 1, index == 2, seen, frames, None)


def assert_same(one, other):
    """All fields but the pixels and what is stored."""
    np.testing.assert_array_equal(one.rewards, other.rewards)
    np.testing.assert_array_equal(one.observation.proprio, other.observation.proprio)
    assert (one.num_executed, one.terminated, one.truncated) == (other.num_executed, other.terminated, other.truncated)
    assert (one.success, one.error, len(one.frames)) == (other.success, other.error, len(other.frames))
    assert all(np.array_equal(a, b) for a, b in zip(one.frames, other.frames, strict=True))
    assert one.observation.instruction == other.observation.instruction
    assert one.observation.images.size == 0 and one.observation.images.shape[1:] == other.observation.images.shape[1:]


def travelled(outcomes):
    return pickle.loads(pickle.dumps(Outcomes.of(outcomes, pixel_digest)))


def test_outcomes_arrive_as_they_were():
    outcomes = [outcome(index) for index in range(4)]
    arrived = travelled(outcomes).apart({}, None)
    for one, other in zip(arrived, outcomes, strict=True):
        assert_same(one, other)
        assert one.observation.digest == pixel_digest(other.observation.images)
        assert one.observation.inputs is None and one.observation.fetch is None
        assert type(one.num_executed) is int and type(one.terminated) is bool


@pytest.mark.parametrize("keeps_images", [True, False])
def test_recorded_steps_are_named_by_their_outcome(keeps_images):
    """Of the outcomes 1 and 3, of which 1 passed an observation; each in an object of its own."""
    outcomes = [outcome(index) for index in range(4)]
    outcomes[1] = replace(outcomes[1], passed=(outcomes[0].observation,))
    whole = Outcomes.of(outcomes, lambda images: b"")
    seen = Seen(whole, [[0, 1, 2, 3]], [None], "a machine", keeps_images, RowBytes(100, 0), recorded=(1, 3))
    arrived = seen.named(("inputs", *["images"] * keeps_images, "steps of 1", "steps of 3"))
    images = [StoredObservation("images", index) if keeps_images else None for index in (0, 2)]
    last = [images[0], StoredObservation("steps of 1", 1), images[1], StoredObservation("steps of 3", 0)]
    assert [each.observation.fetch for each in arrived] == last
    passed = [[one.fetch for one in each.passed] for each in arrived]
    assert passed == [[], [StoredObservation("steps of 1", 0)], [], []]


def test_a_failure_among_them_has_no_rewards():
    outcomes = [outcome(0), replace(started(outcome(1).observation), error="it died"), outcome(2)]
    for one, other in zip(travelled(outcomes).apart({}, None), outcomes, strict=True):
        assert_same(one, other)


def test_prompts_travel_without_their_pixels():
    prompt = Prompt(
        ({"role": "user", "content": "Which?"},), (np.ones((2, 2, 3), np.uint8),), columns={"solution": "A"}
    )
    (arrived,) = travelled([started(Observation.of_prompt(prompt))]).apart({}, None)
    assert arrived.observation.prompt == replace(prompt, images=())


@pytest.mark.parametrize("keeps_images", [True, False])
def test_names_belong_to_the_outcomes_that_they_are_of(keeps_images):
    """Outcome 1 has ended: the rows of the two pieces are those of outcomes 0, 2 and 3."""
    whole = Outcomes.of([outcome(index) for index in range(4)], lambda images: b"")
    seen = Seen(whole, [[0, 2], [3]], [(5, 6), None], "a machine", keeps_images, RowBytes(100, 0))
    stored = ("first", "second", *["images"] * keeps_images)
    named = [each.observation for each in seen.named(stored)]
    rows = [each.inputs and (each.inputs.batch.reference, each.inputs.index) for each in named]
    assert rows == [("first", 0), None, ("first", 1), ("second", 0)]
    first = named[0].inputs.batch
    assert (first.num_rows, first.row_lengths, first.machine, first.num_bytes) == (2, (5, 6), "a machine", 200)
    fetches = [StoredObservation("images", index) if keeps_images else None for index in range(4)]
    assert [each.fetch for each in named] == fetches


def test_chunks_are_sent_as_one_array_and_texts_as_they_are():
    chunks = [np.full((2, 7), index, np.float32) for index in range(3)]
    np.testing.assert_array_equal(_together(chunks), np.stack(chunks))
    assert _together(["a", "b"]) == ["a", "b"]
