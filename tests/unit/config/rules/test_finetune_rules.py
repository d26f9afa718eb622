"""Rules of `vlarl finetune`: each broken once, with the remedy it names."""

import pytest

from vlarl.config import FinetuneConfig
from vlarl.config.derive import derive_finetune
from vlarl.config.rules.across import check


def complaints(**sections: dict) -> list[str]:
    return [str(problem) for problem in check(FinetuneConfig.model_validate(sections))]


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"demos": {"suites": ("gym",)}}, "demos.suites = ['gym']: your environment has no scripted expert"),
        ({"demos": {"suites": ("libero_spacial",)}}, "did you mean 'libero_spatial'?"),
        ({"demos": {"suites": ("libero_10", "libero_10")}}, "name each suite once"),
        ({"demos": {"suites": ("libero_10",), "task_ids": (3, 12)}}, "no task 12; the suite has tasks 0 to 9"),
        ({"demos": {"path": "data", "task_ids": (1,)}}, "demos.task_ids with demos.path = 'data'"),
        (
            {"demos": {"image_size": 64}},
            "demos.image_size = 64 with policy.path = 'init:tiny-oft': must be a multiple of 14, the side of a patch; use 70",
        ),
        ({"optim": {"steps": 10, "warmup_steps": 11}}, "the warm-up would never end"),
    ],
)
def test_what_cannot_work_is_refused(sections, complaint):
    (message,) = complaints(**sections)
    assert complaint in message


def test_what_can_work_is_not():
    assert complaints(demos={"suites": ("libero_90",), "task_ids": (89,), "image_size": 112}) == []
    assert complaints(demos={"image_size": 64}, policy={"path": "builtin:tiny-oft"}) == []
    assert complaints(demos={"path": "data"}) == []


def test_demonstrations_are_counted_where_they_are_played():
    def counts(**demos: object) -> tuple[int | None, int | None]:
        derived = derive_finetune(FinetuneConfig.model_validate({"demos": demos}))
        return derived.num_tasks, derived.num_demonstrations

    assert counts(suites=("libero_90", "libero_10"), episodes_per_task=3) == (100, 300)
    assert counts(suites=("libero_90", "libero_10"), task_ids=(1, 2, 3), episodes_per_task=3) == (6, 18)
    assert counts(path="data") == (None, None)
