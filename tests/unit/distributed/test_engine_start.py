"""Engines that share a GPU start once the learners have loaded; others start beside them."""

import pytest

from vlarl.config.derive import engines_sleep
from vlarl.config.source.load import load_config
from vlarl.distributed.demand import Demand
from vlarl.distributed.engine_start import EngineStart

RAY = {"distributed.backend": "ray", "policy.path": "builtin:tiny-openvla", "vllm.num_engines": 1}
HALVES = {"distributed.learner_gpus": 0.5, "distributed.engine_gpus": 0.5}
COLOCATED = RAY | HALVES | {"distributed.colocate": True}


def order(after_learners: bool) -> list[str]:
    events: list[str] = []

    def start():
        events.append("engines start")
        return ["engine 0"]

    starting = EngineStart(start, after_learners)
    events.append("environments")
    assert starting.with_learners(lambda: events.append("learners load")) == ["engine 0"]
    return events


def test_engines_that_share_gpus_start_when_the_learners_have_loaded():
    assert order(after_learners=True) == ["environments", "learners load", "engines start"]


def test_engines_on_gpus_of_their_own_do_not_wait():
    assert order(after_learners=False) == ["engines start", "environments", "learners load"]


@pytest.mark.parametrize(
    ("overrides", "on_gpus", "share", "fit"),
    [
        (COLOCATED, True, True, True),
        (COLOCATED, False, False, False),
        (RAY | HALVES, True, False, True),  # Ray may assign both halves of one GPU
        (RAY, True, False, False),
        (RAY | {"distributed.learner_gpus": 0.6, "distributed.engine_gpus": 0.5}, True, False, False),
        (COLOCATED | {"distributed.engine_gpus": 0.0}, True, False, False),
    ],
)
def test_which_engines_share_gpus(overrides, on_gpus, share, fit):
    demand = Demand.of(load_config("tabletop_grpo", overrides), 2, on_gpus)
    assert (demand.share_gpus, demand.fit_on_one_gpu) == (share, fit)


@pytest.mark.parametrize(
    ("overrides", "share_gpus", "sleeps"),
    [
        (COLOCATED, True, True),
        (COLOCATED | {"vllm.sleep": False}, True, False),
        (COLOCATED, False, False),
        (COLOCATED | {"distributed.asynchronous": True}, True, False),
        (COLOCATED | {"vllm.num_engines": 0}, True, False),
    ],
)
def test_engines_sleep_by_default_where_it_is_possible(overrides, share_gpus, sleeps):
    assert engines_sleep(load_config("tabletop_grpo", overrides), share_gpus) is sleeps
