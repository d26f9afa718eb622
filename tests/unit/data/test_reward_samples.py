"""Frames of episodes as labelled samples."""

import numpy as np
import pytest

from vlarl.data.demo_set import DemoSet
from vlarl.data.reward_samples import EpisodeStates, refuse_one_kind
from vlarl.errors import UsageError


def demos(*episodes: tuple[int, bool]) -> DemoSet:
    """Episodes of these lengths and outcomes, whose images have the value of their frame."""
    lengths = np.array([length for length, _ in episodes])
    count = int(lengths.sum())
    images = np.arange(count, dtype=np.uint8)[:, None, None, None, None] * np.ones((1, 2, 4, 4, 3), np.uint8)
    images[:, 1] += 100  # the wrist's view, which is not read
    success = np.array([won for _, won in episodes])
    zeros = np.zeros((count, 7), np.float32)
    ids = np.repeat(np.arange(len(episodes)) % 2, lengths)
    return DemoSet("mine", images, zeros, zeros, ids, ("pick", "place"), lengths, success)


def test_a_frame_is_as_good_as_the_success_is_near():
    states = EpisodeStates(demos((5, True), (3, False), (1, True)), 3, 0.5, 4)
    assert states.labels.tolist() == [0.5**4, 0.5**2, 1, 0, 0, 0, 1]
    assert states.is_last.tolist() == [False, False, True, False, False, True, True]
    shown = [states.candidate(index) for index in range(len(states))]
    assert [int(each.prompt.images[0].max()) for each in shown] == [0, 2, 4, 5, 6, 7, 8]
    assert [each.prompt.text for each in shown] == ["pick"] * 3 + ["place"] * 3 + ["pick"]
    assert {each.response for each in shown} == {""}
    assert EpisodeStates(demos((2, True), (2, False)), 2, 1.0, 4).labels.tolist() == [1, 1, 0, 0]


def test_agreement_is_that_of_the_last_frames_of_all_episodes():
    states = EpisodeStates(demos((5, True), (3, False), (4, True), (6, False)), 3, 0.5, 4)
    indices = states.measured(2)
    assert indices.tolist() == [0, 2, 5, 8, 11]
    found = states.agreement(indices, np.array([-9.0, 1.0, 3.0, 2.0, -1.0], np.float32))
    assert found == {"auc": 0.5, "accuracy": 0.75}


def test_labels_of_one_kind_are_refused():
    refuse_one_kind(np.array([True, False]), "the two", "none")
    with pytest.raises(UsageError, match="the two are all bad, and both kinds are needed: record more"):
        refuse_one_kind(np.array([False, False]), "the two", "record more")
