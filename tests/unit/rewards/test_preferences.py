"""Losses of reward models against their formulas, and how agreement with labels is measured."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vlarl.decisions import TensorRows
from vlarl.rewards.preferences import LabelRows, PairRows, auc, label_losses, pair_losses


@dataclass(frozen=True)
class Numbers(TensorRows):
    value: torch.Tensor  # [B]


def numbers(*values: float) -> Numbers:
    return Numbers(torch.tensor(values, dtype=torch.float64))


def double(rows: TensorRows) -> torch.Tensor:
    assert isinstance(rows, Numbers)
    return 2 * rows.value


def test_the_loss_of_a_pair_is_bradley_and_terrys():
    margins = [-30.0, -1.5, 0.0, 0.25, 4.0]
    found = pair_losses(torch.tensor(margins, dtype=torch.float64))
    expected = [-math.log(1 / (1 + math.exp(-margin))) for margin in margins]
    assert found.tolist() == pytest.approx(expected, rel=1e-13)
    single = pair_losses(torch.tensor(margins))
    assert single.double().tolist() == pytest.approx(expected, rel=4 * float(np.finfo(np.float32).eps))
    assert pair_losses(torch.tensor([-500.0])).item() == 500  # where the formula itself overflows


def test_the_loss_of_a_label_is_the_cross_entropy():
    scores, labels = [-3.0, 0.5, 2.0, 0.0], [0.0, 1.0, 0.3, 0.9]
    found = label_losses(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64))
    good = [1 / (1 + math.exp(-score)) for score in scores]
    expected = [-y * math.log(p) - (1 - y) * math.log(1 - p) for p, y in zip(good, labels, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-13)


def test_a_pairs_value_is_the_chosen_score_less_the_rejected_one():
    rows = PairRows(numbers(1.0, 5.0), numbers(4.0, 4.0))
    assert rows.values(double).tolist() == [-6.0, 2.0]
    assert rows.losses(rows.values(double)).tolist() == pair_losses(torch.tensor([-6.0, 2.0]).double()).tolist()
    assert rows.rows(slice(1, 2)).values(double).tolist() == [2.0]


def test_labelled_rows_score_their_inputs():
    rows = LabelRows(numbers(1.0, -1.0), torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert rows.values(double).tolist() == [2.0, -2.0]
    expected = math.log(1 + math.exp(-2))
    assert rows.losses(rows.values(double)).tolist() == pytest.approx([expected] * 2, rel=1e-13)


def test_the_auc_is_that_of_all_pairs():
    rng = np.random.default_rng(0)
    for size in (2, 5, 40):
        scores = rng.integers(0, 6, size).astype(np.float32)  # with ties
        is_good = rng.random(size) < 0.4
        is_good[:2] = True, False
        pairs = [(a > b) + 0.5 * (a == b) for a in scores[is_good] for b in scores[~is_good]]
        assert auc(scores, is_good) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert auc(np.array([1.0, 2.0]), np.array([True, False])) == 0
    assert auc(np.array([2.0, 1.0]), np.array([True, False])) == 1


@pytest.mark.parametrize("kind", [True, False])
def test_members_of_one_kind_have_no_auc(kind):
    with pytest.raises(ValueError, match="both kinds are needed"):
        auc(np.array([1.0, 2.0]), np.array([kind, kind]))
