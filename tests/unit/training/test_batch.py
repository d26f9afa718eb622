"""Batches: which tokens count and how much, that every row is used once, and which go together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.decisions import engine_logprobs, taken_ids

from vlarl.algorithms.base import Estimate
from vlarl.config.schema import OptimConfig
from vlarl.decisions import Row
from vlarl.policies.tiny import init_tiny
from vlarl.training.annotate import Annotations
from vlarl.training.batch import (
    build_batch,
    mean_by_trajectory,
    microbatches,
    minibatches,
    row_lengths,
    sizes_within,
    uncounted,
    value_weight,
    weighted,
    whole_minibatches,
    with_estimates,
)


@pytest.fixture(scope="module")
def policy():
    return init_tiny("parallel", seed=0, chunk_length=3)


def read_by(policy, episode):
    """The episode with the inputs that the policy reads."""
    read = tuple(replace(t, inputs=Row(policy.process([t.observation]), 0)) for t in episode.transitions)
    return replace(episode, transitions=read)


def test_rows_keep_their_order_and_tokens_past_the_end_are_masked(policy, trajectory):
    first = read_by(policy, trajectory([[0] * 3, [0] * 3], num_executed=[3, 1], seed=1))
    second = read_by(policy, trajectory([[0] * 3], num_executed=[2], seed=2))
    batch = build_batch([first, second])
    assert batch.mask.sum(dim=1).tolist() == [21, 7, 14]
    assert batch.mask.tolist() == [[t < n for t in range(21)] for n in (21, 7, 14)]
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.decisions.step.tolist() == [[t // 7 for t in range(21)]] * 3
    later = ("learner_logprobs", "entropy", "ref_logprobs", "old_values", "advantages", "returns", "value_mask")
    assert all(getattr(batch, name) is None for name in (*later, "old_logprobs", "weights", "sequence_log_ratio"))
    taken = [*first.transitions, *second.transitions]
    ids, logprobs = batch.decisions.sample.ids.numpy(), batch.decisions.engine_logprobs.numpy()
    np.testing.assert_array_equal(ids, np.stack([taken_ids(t) for t in taken]))
    np.testing.assert_array_equal(logprobs, np.stack([engine_logprobs(t) for t in taken]))
    alone = policy.process([taken[1].observation])
    row = batch.inputs.rows(torch.tensor([1])).to("cpu")
    assert torch.equal(row.input_ids, alone.input_ids) and torch.equal(row.pixels, alone.pixels)
    assert torch.equal(row.proprio, alone.proprio)


def test_estimates_become_columns_in_the_order_of_the_rows(trajectory):
    episodes = [trajectory([[0] * 3, [0] * 3], num_executed=[3, 1], seed=1), trajectory([[0] * 3], seed=2)]
    estimates = [
        Estimate(np.float32([[0.5], [-1]]), np.float32([[1], [2]])),
        Estimate(np.float32([[7]]), np.float32([[5]])),
    ]
    batch = with_estimates(build_batch(episodes), episodes, estimates, "chunk")
    assert batch.advantages[:, 0].tolist() == [0.5, -1, 7]
    assert (batch.advantages == batch.advantages[:, :1]).all() and batch.advantages.shape == (3, 21)
    assert batch.returns.tolist() == [[1], [2], [5]]
    assert batch.value_mask.tolist() == [[True]] * 3


def test_the_version_that_sampled_stays_with_each_row(trajectory):
    first, second = trajectory([[0], [0]]), trajectory([[0]], seed=1)
    newer = tuple(replace(t, decided=Row(t.decision.of_version(4), 0)) for t in second.transitions)
    assert build_batch([first, replace(second, transitions=newer)]).decisions.version.tolist() == [0, 0, 4]


def test_without_a_critic_there_are_no_value_targets(trajectory):
    episodes = [trajectory([[0] * 3])]
    batch = with_estimates(build_batch(episodes), episodes, [Estimate(np.float32([[1]]))], "chunk")
    assert batch.returns is None and batch.old_values is None and batch.value_mask is None
    assert value_weight(batch, torch.tensor([0])) == 1.0
    assert batch.rows(torch.tensor([0])).returns is None


@pytest.mark.parametrize(("num_rows", "parts"), [(10, 1), (10, 3), (7, 7), (2, 5)])
def test_minibatches_use_every_row_once(num_rows, parts):
    chosen = minibatches(num_rows, parts, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(chosen).tolist()) == list(range(num_rows))
    sizes = [len(s) for s in chosen]
    assert len(chosen) == min(num_rows, parts) and max(sizes) - min(sizes) <= 1
    again = minibatches(num_rows, parts, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(chosen, again, strict=True))


def test_minibatches_are_shuffled():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.cat(minibatches(50, 2, generator)).tolist() for _ in range(2))
    assert first != sorted(first) and first != second


def test_microbatches_keep_order_and_lose_nothing():
    rows = torch.tensor([5, 2, 9, 4, 1])
    assert [m.tolist() for m in microbatches(rows, OptimConfig(microbatch_size=2), None)] == [[5, 2], [9, 4], [1]]


@pytest.fixture
def three_episodes(policy, trajectory):
    """Episodes of 3, 1 and 2 decisions with 6, 1 and 4 executed steps; values encode where they come from."""
    episodes = [
        read_by(policy, trajectory([[0] * 3] * 3, num_executed=[3, 1, 2], seed=1)),
        read_by(policy, trajectory([[0] * 3], num_executed=[1], seed=2)),
        read_by(policy, trajectory([[0] * 3] * 2, num_executed=[3, 1], seed=3)),
    ]

    def build(columns: int):
        counts = [len(e.transitions) for e in episodes]
        values = [np.float32([[10 * t + v for v in range(columns)] for t in range(count)]) for count in counts]
        level = {1: "chunk", 3: "step", 21: "token"}[columns]
        batch = with_estimates(build_batch(episodes), episodes, [Estimate(v, v) for v in values], level)
        return replace(batch, old_values=torch.from_numpy(np.concatenate(values)))

    return build


@pytest.mark.parametrize("columns", [1, 3, 21])
def test_advantages_of_chunks_steps_or_tokens_reach_their_tokens(three_episodes, columns):
    batch = three_episodes(columns)
    assert batch.advantages.shape == (6, 21) and batch.returns.shape == (6, columns)
    assert batch.advantages[1].tolist() == [10 + token // (21 // columns) for token in range(21)]
    executed = torch.tensor([3, 1, 2, 1, 3, 1])  # steps
    per_step = max(columns // 3, 1)
    counted = executed * per_step if columns > 1 else torch.ones(6)
    assert batch.value_mask.sum(dim=1).tolist() == counted.tolist()
    assert value_weight(batch, torch.tensor([0, 2])) == pytest.approx(1 / float(counted[0] + counted[2]))


def test_weights_are_those_of_the_minibatch_alone(three_episodes):
    batch, rows = three_episodes(1), torch.tensor([5, 0, 4])
    by_token = weighted(batch, rows, "token_mean").weights
    assert by_token[rows].sum() == pytest.approx(1.0) and by_token[[1, 2, 3]].abs().sum() == 0
    assert by_token[0, 0] == pytest.approx(1 / 49) and by_token[5].tolist() == pytest.approx([1 / 49] * 7 + [0] * 14)
    by_episode = weighted(batch, rows, "sequence_mean").weights
    assert by_episode[0].tolist() == pytest.approx([1 / 2 / 21] * 21)  # two episodes, 21 and 28 tokens
    assert by_episode[5].tolist() == pytest.approx([1 / 2 / 28] * 7 + [0] * 14)
    assert weighted(batch, rows[:0], "token_mean").weights.sum() == 0
    assert value_weight(batch, rows[:0]) == 1.0


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_minibatches_of_whole_trajectories_split_none(three_episodes, parts):
    trajectory = three_episodes(1).trajectory
    chosen = whole_minibatches(trajectory, parts, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(chosen).tolist()) == list(range(6)) and len(chosen) == min(parts, 3)
    members = [set(trajectory[rows].tolist()) for rows in chosen]
    assert sum(len(m) for m in members) == 3, "a trajectory is in one minibatch only"
    for rows in chosen:
        for number in set(trajectory[rows].tolist()):
            inside = [row for row in rows.tolist() if trajectory[row] == number]
            assert inside == sorted(inside), "its decisions stay in order"


def test_the_mean_of_a_trajectory_counts_its_executed_tokens():
    x = torch.tensor([[1.0, 2.0], [6.0, float("nan")], [5.0, 7.0], [0.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    means = mean_by_trajectory(x, mask, torch.tensor([4, 4, 9, 11]))
    assert means.tolist() == [3.0, 3.0, 6.0, 0.0]


def test_sorting_by_length_saves_padding_and_loses_no_row(policy, trajectory):
    episodes = [trajectory([[0] * 3] * 5, seed=seed) for seed in range(8)]  # prompts of three lengths in turn
    batch = build_batch([read_by(policy, episode) for episode in episodes]).to("cpu")
    lengths = batch.inputs.lengths
    assert torch.equal(lengths, batch.inputs.attention_mask.sum(dim=1))
    rows = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))

    def padding(parts) -> int:
        return sum(int((~batch.rows(part).inputs.attention_mask).sum()) for part in parts)

    mixed, alike = (
        microbatches(rows, OptimConfig(microbatch_size=8, sort_by_length=sort), row_lengths(batch.inputs))
        for sort in (False, True)
    )
    assert sorted(torch.cat(alike).tolist()) == list(range(40)) and [len(p) for p in alike] == [8] * 5
    assert all(lengths[a].max() <= lengths[b].min() for a, b in zip(alike, alike[1:], strict=False))
    fractions = [padding(parts) / (padding(parts) + int(lengths.sum())) for parts in (mixed, alike)]
    assert fractions[0] > 0.3 and fractions[1] < 0.1, fractions


@pytest.mark.parametrize(
    ("lengths", "budget", "packed", "sizes"),
    [
        ([(2, 3), (2, 3), (2, 3)], 10, False, [2, 1]),
        ([(2, 3), (2, 3), (2, 3)], 10, True, [2, 1]),
        ([(2, 3), (2, 3), (2, 3)], 9, True, [1, 1, 1]),
        ([(9, 1), (1, 9), (1, 1)], 22, True, [3]),
        ([(9, 1), (1, 9), (1, 1)], 22, False, [1, 2]),  # padded, the first two would be 2 * (9 + 9)
        ([(9, 1), (1, 1), (1, 1)], 20, False, [2, 1]),
        ([(50, 0), (1, 1), (60, 60), (1, 1), (1, 1)], 10, True, [1, 1, 1, 2]),  # rows that are longer are alone
        ([(50, 0), (1, 1), (60, 60), (1, 1), (1, 1)], 10, False, [1, 1, 1, 2]),
        ([(1, 1)], 1, False, [1]),
        ([], 10, True, []),
    ],
)
def test_a_piece_takes_rows_up_to_its_budget_of_tokens(lengths, budget, packed, sizes):
    assert sizes_within(torch.tensor(lengths, dtype=torch.int64).reshape(-1, 2), budget, packed=packed) == sizes


@pytest.mark.parametrize("packed", [False, True])
def test_pieces_of_a_budget_are_as_large_as_they_can_be_and_lose_no_row(packed):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (60, 2), generator=generator)
    rows = torch.randperm(60, generator=generator)[:50]
    optim = OptimConfig(microbatch_tokens=400, packing=packed, sort_by_length=True)
    pieces = microbatches(rows, optim, lengths)

    def cost(piece) -> int:
        own = lengths[torch.as_tensor(piece)]
        return int(own.sum()) if packed else len(own) * int(own.amax(dim=0).sum())

    assert sorted(torch.cat(pieces).tolist()) == sorted(rows.tolist())
    assert all(cost(piece) <= 400 for piece in pieces)
    assert all(cost([*a.tolist(), int(b[0])]) > 400 for a, b in zip(pieces, pieces[1:], strict=False))
    totals = lengths.sum(dim=1)[torch.cat(pieces)]
    assert (totals.diff() >= 0).all(), "rows of like length are together"


def test_annotations_become_columns(trajectory, configure):
    batch = build_batch([trajectory([[0] * 3] * 2)]).to("cpu")
    engine = batch.decisions.engine_logprobs
    found = Annotations(engine + 1, engine + 2, torch.tensor([[3.0], [4.0]]), engine - 1)
    annotated = found.onto(batch, configure())
    torch.testing.assert_close(annotated.ref_logprobs, engine - 1)
    assert torch.equal(annotated.learner_logprobs, engine + 1) and torch.equal(annotated.old_logprobs, engine + 1)
    assert torch.equal(annotated.entropy, engine + 2) and annotated.old_values.tolist() == [[3.0], [4.0]]
    assert annotated.rows(torch.tensor([1])).ref_logprobs.shape == (1, 21)
    from_engine = found.onto(batch, configure(algorithm={"old_logprobs": "engine"}))
    assert torch.equal(from_engine.old_logprobs, engine) and torch.equal(from_engine.learner_logprobs, engine + 1)
    assert Annotations().onto(batch, configure()).old_logprobs is None


def test_of_an_uncounted_row_nothing_counts(three_episodes):
    batch = weighted(three_episodes(3), torch.arange(6), "token_mean")
    idle = uncounted(batch)
    assert not idle.mask.any() and not idle.value_mask.any() and not idle.weights.any()
    assert torch.equal(idle.decisions.sample.ids, batch.decisions.sample.ids) and batch.mask.any()


def test_rows_of_a_batch_are_chosen_and_moved_as_inputs_do_it_themselves(policy, trajectory):
    """Prompts lose the columns that none of the rows uses, and whether they are ragged is found on the host."""
    batch = replace(b := build_batch([read_by(policy, trajectory([[0] * 3] * 3))]), inputs=b.inputs.joined())
    lengths = batch.inputs.lengths
    shortest = int(lengths.argmin())
    row = batch.rows(torch.tensor([shortest])).to("cpu")
    assert row.inputs.input_ids.shape[1] == int(lengths[shortest]) < batch.inputs.input_ids.shape[1]
    assert row.inputs.known_ragged is False and batch.to("cpu").inputs.known_ragged is True


def test_a_pinned_batch_is_the_same_batch(three_episodes, monkeypatch):
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)  # the real one needs a GPU
    batch = weighted(three_episodes(3), torch.arange(6), "token_mean")
    copied = batch.pinned().to("cpu")
    assert len(pinned) == 6 + 4 + 5, "every column, all four of the inputs and all five of the decisions"
    for name in ("advantages", "mask", "trajectory", "returns", "old_values", "value_mask", "weights"):
        assert torch.equal(getattr(copied, name), getattr(batch, name)), name
    for name in ("engine_logprobs", "mask", "step", "version"):
        assert torch.equal(getattr(copied.decisions, name), getattr(batch.decisions, name)), name
    assert torch.equal(copied.decisions.sample.ids, batch.decisions.sample.ids)
    assert torch.equal(copied.inputs.pixels, batch.inputs.joined().pixels)
    assert copied.ref_logprobs is None and copied.sequence_log_ratio is None
