"""Batches with one row for each decision: rows, padding, parts of their own, and the way to another process."""

import pickle
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from vlarl.decisions import Decisions, PickedRows, Row, Sampling, TensorRows, TrainBatch
from vlarl.policies.openvla.decisions import ActionTokens, regressed_decisions, token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs


@dataclass(frozen=True)
class Words(TensorRows):
    ids: torch.Tensor  # [B, L]
    weight: torch.Tensor  # [B]


@dataclass(frozen=True)
class Pages(TensorRows):
    """A batch with a batch in it, a column that may be missing, and a field that is no column."""

    words: Words
    number: torch.Tensor  # [B]
    marks: torch.Tensor | None = None  # [B, 2]
    title: str = ""


def words(*rows: list[int]) -> Words:
    return Words(torch.tensor(rows), torch.tensor([float(sum(row)) for row in rows]))


def pages(*rows: list[int], first: int = 0) -> Pages:
    return Pages(words(*rows), torch.arange(first, first + len(rows)), title="a")


def test_rows_by_index_and_by_slice():
    batch = pages([1, 2], [3, 4], [5, 6])
    chosen = batch.rows(torch.tensor([2, 0, 2]))
    assert len(batch) == len(chosen) == 3
    assert chosen.words.ids.tolist() == [[5, 6], [1, 2], [5, 6]] and chosen.words.weight.tolist() == [11, 3, 11]
    assert chosen.number.tolist() == [2, 0, 2] and chosen.marks is None and chosen.title == "a"
    last = batch.rows(slice(2, 9))
    assert len(last) == 1 and last.words.ids.tolist() == [[5, 6]]
    assert len(batch.rows(slice(0, 0))) == 0


def test_a_row_is_pickled_without_the_others():
    """Transitions go to other processes: what they send must not be the whole batch of an engine."""
    batch = pages([1, 2], *([3, 4],) * 1000)
    content = pickle.dumps(Row(batch, 1))
    back = pickle.loads(content)
    assert back.index == 0 and back.alone().words.ids.tolist() == [[3, 4]] and back.batch.number.tolist() == [1]
    assert len(content) < 1000


def test_picked_rows_are_those_of_their_batches_in_any_order():
    first, second, third = pages([1, 2], [3, 4]), pages([5, 6, 7]), pages([8])
    rows = [Row(second, 0), Row(first, 1), Row(third, 0), Row(first, 0), Row(second, 0)]
    picked = PickedRows.of(rows)
    wanted = Pages.cat([row.alone() for row in rows])
    order = torch.tensor([3, 1, 4])
    for found, expected in (
        (picked.joined(), wanted),
        (picked.to("cpu"), wanted),
        (picked.map(torch.clone), wanted),
        (picked.rows(order).joined(), Pages.cat([rows[index].alone() for index in order])),
        (picked.rows(slice(1, 3)).joined(), Pages.cat([row.alone() for row in rows[1:3]])),
        (pickle.loads(pickle.dumps(picked)).joined(), wanted),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True))
    assert len(picked) == 5 and len(picked.empty()) == 0 and picked.empty().batches == ()
    assert [batch is own for batch, own in zip(picked.batches, (second, first, third), strict=True)] == [True] * 3


def test_picked_rows_know_how_long_they_are():
    batch, other = prompts(2, 5, 3, width=6), prompts(4, width=4)
    picked = PickedRows.of([Row(batch, 2), Row(other, 0), Row(batch, 0)])
    assert picked.lengths.tolist() == [3, 4, 2] and picked.rows(torch.tensor([2, 0])).lengths.tolist() == [2, 3]
    assert picked.joined().input_ids.shape == (3, 4) and picked.joined().lengths.tolist() == [3, 4, 2]
    assert PickedRows.of([Row(pages([1, 2]), 0)]).lengths is None


def test_shorter_rows_are_padded_with_zeros_on_the_right():
    joined = Words.cat([words([1], [2]), words([3, 4, 5])])
    assert joined.ids.tolist() == [[1, 0, 0], [2, 0, 0], [3, 4, 5]] and joined.weight.tolist() == [1, 2, 12]
    deep = TensorsOfAnyRank.cat([TensorsOfAnyRank(torch.ones(1, 1, 2)), TensorsOfAnyRank(torch.ones(1, 2, 1))])
    assert deep.column.tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
    flags = TensorsOfAnyRank.cat([TensorsOfAnyRank(torch.ones(1, n, dtype=torch.bool)) for n in (1, 2)])
    assert flags.column.tolist() == [[True, False], [True, True]]


@dataclass(frozen=True)
class TensorsOfAnyRank(TensorRows):
    column: torch.Tensor


def test_batches_in_a_batch_are_padded_and_joined_with_it():
    joined = Pages.cat([pages([1]), pages([2, 3], [4, 5], first=7)])
    assert joined.words.ids.tolist() == [[1, 0], [2, 3], [4, 5]] and joined.number.tolist() == [0, 7, 8]
    assert joined.marks is None and joined.title == "a" and len(joined) == 3


def test_a_column_that_is_there_is_changed_and_one_that_is_missing_stays_so():
    batch = pages([1, 2])
    marked = replace(batch, marks=torch.tensor([[1, 2]]))
    assert batch.map(lambda column: column + 1).marks is None
    more = marked.map(lambda column: column + 1)
    assert more.marks is not None and more.marks.tolist() == [[2, 3]]
    assert (more.words.ids.tolist(), more.number.tolist()) == ([[2, 3]], [1])
    assert (len(batch.tensors()), len(marked.tensors())) == (3, 4)
    assert Pages.cat([marked, marked]).marks.tolist() == [[1, 2], [1, 2]]


def test_tensors_come_in_the_order_of_the_fields():
    batch = replace(pages([1, 2]), marks=torch.tensor([[8, 9]]))
    assert [tensor.tolist() for tensor in batch.tensors()] == [[[1, 2]], [3], [0], [[8, 9]]]
    assert batch.shape_key == (1, 2, 1, 1, 1, 2)


def test_without_a_length_rows_are_alike():
    batch = words([1, 2])
    assert batch.lengths is None and batch.rounded_up() is batch


def test_a_batch_moves_with_all_of_its_columns():
    moved = replace(pages([1, 2]), marks=torch.zeros(1, 2)).to("meta")
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"} and len(moved.tensors()) == 4


def test_tensors_travel_as_arrays_and_come_back_as_tensors():
    batch = replace(pages([1, 2], [3, 4]), marks=torch.zeros(2, 2).T)
    assert isinstance(batch.words.__getstate__()["ids"], np.ndarray)
    assert batch.__getstate__()["words"] is batch.words
    back = pickle.loads(pickle.dumps(batch))
    assert type(back) is Pages and type(back.words) is Words and back.title == "a"
    for ours, theirs in zip(batch.tensors(), back.tensors(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    assert pickle.loads(pickle.dumps(pages([1]))).marks is None


def test_a_column_that_is_a_view_travels_with_its_own_rows_alone():
    """`step` of decisions is one row that all share: it is written out."""
    decisions = token_decisions(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4), 2)
    assert pickle.loads(pickle.dumps(decisions)).step.tolist() == [[0, 0, 1, 1]] * 3
    big = words(*[[1] * 1000] * 100)
    assert len(pickle.dumps(big.rows(slice(0, 1)))) < len(pickle.dumps(big)) / 50


def test_arrays_of_an_object_store_are_read_without_a_copy_or_a_warning():
    state = words([1, 2]).__getstate__()
    ids = state["ids"]
    assert isinstance(ids, np.ndarray)
    ids.flags.writeable = False
    back = Words.__new__(Words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back.__setstate__(state)
    assert back.ids.tolist() == [[1, 2]] and back.ids.data_ptr() == ids.ctypes.data


def decided() -> Decisions:
    """Two decisions of two steps with three dimensions."""
    return token_decisions(torch.arange(12).reshape(2, 6), -torch.arange(12.0).reshape(2, 6), 3)


def test_elements_of_a_decision_belong_to_environment_steps():
    decisions = decided()
    assert decisions.step.tolist() == [[0, 0, 0, 1, 1, 1]] * 2 and decisions.mask.all()
    assert decisions.version.tolist() == [0, 0] and isinstance(decisions.sample, ActionTokens)


def test_only_executed_steps_count():
    decisions = decided().executed(torch.tensor([1, 2]))
    assert decisions.mask.tolist() == [[True] * 3 + [False] * 3, [True] * 6]
    assert not decided().executed(torch.tensor([0, 0])).mask.any()
    padded = replace(decided(), mask=torch.tensor([[True] * 5 + [False]] * 2))
    assert padded.executed(torch.tensor([2, 1])).mask.tolist() == [[True] * 5 + [False], [True] * 3 + [False] * 3]


def test_a_version_is_that_of_all_rows_and_changes_nothing_else():
    before = decided()
    after = before.of_version(4)
    assert after.version.tolist() == [4, 4] and after.version.dtype == torch.int64 and before.version.tolist() == [0, 0]
    assert after.sample is before.sample and after.engine_logprobs is before.engine_logprobs
    mixed = Decisions.cat([Row(before, 0).alone(), Row(after, 1).alone()])
    assert mixed.version.tolist() == [0, 4]


def test_decisions_of_unequal_length_are_padded_and_padding_does_not_count():
    short = token_decisions(torch.tensor([[7, 8]]), torch.tensor([[-1.0, -2.0]]), 1)
    joined = Decisions.cat([short, Row(decided(), 1).alone()])
    assert joined.sample.tensors()[0].tolist() == [[7, 8, 0, 0, 0, 0], [6, 7, 8, 9, 10, 11]]
    assert joined.mask.tolist() == [[True] * 2 + [False] * 4, [True] * 6]
    assert joined.engine_logprobs[0].tolist() == [-1, -2, 0, 0, 0, 0]


def test_regressed_actions_have_log_prob_zero_or_nan():
    actions = torch.tensor([[[0.5, -0.5], [float("inf"), 0.0]]])
    decisions = regressed_decisions(actions)
    assert decisions.engine_logprobs.tolist()[0][:2] == [0, 0] and decisions.step.tolist() == [[0, 0, 1, 1]]
    assert decisions.engine_logprobs.isnan().tolist() == [[False, False, True, False]]


def test_options_of_sampling_that_were_chosen():
    assert Sampling().chosen() == frozenset() == Sampling(temperature=1.0, top_p=1.0).chosen()
    assert Sampling(0.0).chosen() == {"temperature"}
    assert Sampling(1.0, top_p=0.9, top_k=5, max_tokens=7, stop=(2,)).chosen() == {
        "top_p",
        "top_k",
        "max_tokens",
        "stop",
    }


def prompts(*lengths: int, width: int, proprio: bool = True) -> OpenVLAInputs:
    """Prompts of these lengths in a batch of this width; the tokens of a row are its length."""
    rows = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    ids = torch.where(rows, torch.tensor(lengths)[:, None], 0)
    pixels = torch.zeros(len(lengths), 1, 3, 2, 2, dtype=torch.uint8)
    return OpenVLAInputs(ids, rows, pixels, torch.ones(len(lengths), 8) if proprio else None)


def test_rows_leave_out_prompt_columns_that_none_of_them_uses():
    batch = prompts(2, 5, 3, width=6)
    chosen = batch.rows(torch.tensor([2, 0]))
    assert chosen.input_ids.tolist() == [[3, 3, 3], [2, 2, 0]] and chosen.attention_mask.shape == (2, 3)
    assert chosen.pixels.shape == (2, 1, 3, 2, 2) and chosen.proprio is not None and chosen.proprio.shape == (2, 8)
    assert Row(batch, 0).alone().input_ids.tolist() == [[2, 2]] and not Row(batch, 0).alone().ragged
    assert batch.rows(slice(0, 0)).input_ids.shape == (0, 6)
    assert batch.lengths.tolist() == [2, 5, 3]
    assert Row(prompts(2, width=2, proprio=False), 0).alone().proprio is None


def test_rows_of_a_training_batch_choose_and_move_their_inputs_in_the_inputs_own_way():
    """Prompts are cut in microbatches, too, and whether they are ragged is found before they are on the device."""
    batch = TrainBatch(prompts(2, 5, 3, width=6), decided().rows(torch.tensor([0, 1, 0])), torch.arange(3))
    part = batch.rows(torch.tensor([0, 2]))
    assert isinstance(part.inputs, OpenVLAInputs) and part.inputs.input_ids.shape == (2, 3)
    assert part.decisions.mask.shape == (2, 6) and part.trajectory.tolist() == [0, 2] and part.advantages is None
    moved = part.to("meta").inputs
    assert isinstance(moved, OpenVLAInputs) and moved.known_ragged is True and moved.ragged


def test_what_was_known_of_rows_is_not_known_of_others():
    ragged, alike = prompts(2, 5, width=5), prompts(5, 5, width=5)
    assert ragged.to("cpu").known_ragged is True and alike.to("cpu").known_ragged is False
    assert ragged.to("cpu").rows(torch.tensor([1])).known_ragged is None
    both = OpenVLAInputs.cat([prompts(2, width=2).to("cpu"), prompts(5, width=5).to("cpu")])
    assert both.known_ragged is None and both.ragged and both.lengths.tolist() == [2, 5]
    assert both.input_ids.tolist() == [[2, 2, 0, 0, 0], [5] * 5]
    assert not OpenVLAInputs.cat([alike.to("cpu"), alike]).ragged


@pytest.mark.parametrize(("lengths", "width", "expected"), [((2, 5), 5, 8), ((2, 8), 8, 8), ((2, 9), 9, 16)])
def test_ragged_prompts_are_rounded_up_to_a_multiple_of_eight(lengths, width, expected):
    batch = prompts(*lengths, width=width)
    rounded = batch.rounded_up()
    assert rounded.input_ids.shape == rounded.attention_mask.shape == (2, expected) and rounded.ragged
    assert torch.equal(rounded.lengths, batch.lengths) and torch.equal(rounded.input_ids[:, :width], batch.input_ids)


def test_prompts_of_one_length_stay_as_they_are():
    rounded = prompts(5, 5, width=5).rounded_up()
    assert rounded.input_ids.shape == (2, 5) and rounded.known_ragged is False


def test_passes_differ_by_sizes_and_by_padding():
    ragged, alike = prompts(2, 5, width=5), prompts(5, 5, width=5)
    assert ragged.shape_key == (2, 5, 2, 5, 2, 1, 3, 2, 2, 2, 8, 1)
    assert alike.shape_key == (*ragged.shape_key[:-1], 0)
    assert prompts(5, 5, width=5, proprio=False).shape_key == (2, 5, 2, 5, 2, 1, 3, 2, 2, 0)


def test_a_column_that_some_parts_lack_is_refused():
    """Left out without a word it would be missing from all rows."""
    whole = OpenVLAInputs(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 1), torch.ones(1, 3))
    with pytest.raises(ValueError, match="proprio is there in some parts and missing in others"):
        OpenVLAInputs.cat([whole, replace(whole, proprio=None)])


def test_an_empty_batch_holds_no_memory_of_the_whole_one():
    whole = OpenVLAInputs(torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bool), torch.ones(4, 9), None)
    none = whole.empty()
    assert len(none) == 0 and type(none) is OpenVLAInputs
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in none.tensors())
