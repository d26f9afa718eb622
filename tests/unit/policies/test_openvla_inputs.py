"""What OpenVLA reads, alone and within a batch for training."""

import pickle

import torch
from fakes.decisions import split

from vlarl.decisions import TrainBatch
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs

LENGTHS = (2, 5, 3)


def ragged() -> OpenVLAInputs:
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.arange(1, 16).view(3, 5) * mask
    return OpenVLAInputs(ids, mask, torch.zeros(3, 1, 3, 2, 2, dtype=torch.uint8), None)


def training_batch() -> TrainBatch:
    decisions = token_decisions(torch.arange(21).view(3, 7), torch.zeros(3, 7), action_dim=7)
    return TrainBatch(ragged(), decisions, trajectory=torch.arange(3))


def test_rows_leave_out_prompt_columns_that_none_of_them_uses():
    chosen = ragged().rows(torch.tensor([0, 2]))
    assert chosen.input_ids.tolist() == [[1, 2, 0], [11, 12, 13]] and chosen.lengths.tolist() == [2, 3]
    assert chosen.ragged and not ragged().rows(slice(1, 2)).ragged


def test_microbatches_of_a_training_batch_do_so_too():
    """Sorted by length, short prompts would otherwise cost as much as the longest one of the batch."""
    chosen = training_batch().rows(torch.tensor([0, 2]))
    assert chosen.inputs.input_ids.shape == (2, 3)
    assert chosen.decisions.sample.ids.tolist() == [list(range(7)), list(range(14, 21))]
    assert chosen.trajectory.tolist() == [0, 2]


def test_whether_rows_are_ragged_is_found_before_they_leave_the_host():
    """Found on a GPU, the host would wait for it."""
    batch = training_batch()
    assert batch.inputs.known_ragged is None
    assert batch.to("cpu").inputs.known_ragged is True
    assert batch.rows(slice(1, 2)).to("cpu").inputs.known_ragged is False


def test_shorter_prompts_are_padded_where_rows_are_joined():
    whole = ragged()
    joined = OpenVLAInputs.cat(split(whole))
    assert torch.equal(joined.input_ids, whole.input_ids) and torch.equal(joined.attention_mask, whole.attention_mask)


def test_a_batch_is_the_same_in_another_process():
    batch = training_batch()
    there = pickle.loads(pickle.dumps(batch))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch.tensors(), there.tensors(), strict=True))
    assert there.advantages is None and there.inputs.proprio is None
