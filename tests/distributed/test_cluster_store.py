"""A run whose observations fit neither into the object stores nor onto the disks is refused when it starts."""

import re

import pytest
from fakes.cluster_runs import SMALL, wait_for

from vlarl.callbacks import Callbacks, IterationRecord
from vlarl.config.source.load import load_config
from vlarl.errors import UsageError
from vlarl.loop import train

MUCH = {"optim.rollouts_per_update": 10**9, "run.iterations": 10**9}  # petabytes of observations


def begun(record: IterationRecord) -> None:
    raise AssertionError("the run has begun")


def test_the_message_has_the_value_to_set_and_nothing_is_left(ray_here, tmp_path):
    options = {**SMALL, **MUCH, "run.root": str(tmp_path), "run.name": "large", "distributed.backend": "ray"}
    with pytest.raises(UsageError) as refused:
        train(load_config("tabletop_grpo", options), callbacks=Callbacks(on_iteration=begun))
    found = re.search(r"up to ([\d.]+) GB .* Set distributed\.object_store_mb to (\d+)", str(refused.value))
    assert found, str(refused.value)
    assert int(found[2]) * 2**20 * 0.8 == pytest.approx(float(found[1]) * 1e9, rel=0.01), "at 80% Ray begins to spill"
    assert list(tmp_path.iterdir()) == [], "a run that was refused leaves nothing behind"
    wait_for(lambda: ray_here.available_resources().get("CPU") == 8.0, 30)
