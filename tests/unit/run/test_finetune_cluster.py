"""What the learner ranks of a supervised run take of a cluster."""

import numpy as np
import pytest

from vlarl.config.schema import RanksConfig
from vlarl.data.demo_set import DemoSet
from vlarl.data.finetune_trainer import Collected
from vlarl.distributed.demand import Demand
from vlarl.distributed.store_size import MIB
from vlarl.run.finetune_cluster import store_mib


def test_ranks_take_cores_and_gpus_on_each_machine():
    config = RanksConfig(backend="ray", learners_per_node=(2, 1), worker_cpus=0.5, learner_gpus=0.75)
    demand = Demand.of_learners(config, on_gpus=True)
    assert (demand.num_learners, demand.total("CPU"), demand.total("GPU")) == (3, 1.5, 2.25)
    assert demand.other_bundles() == [] and demand.describe() == "3 learners"
    assert Demand.of_learners(config, on_gpus=False).total("GPU") == 0


@pytest.mark.parametrize(("mib", "expected"), [(0, 2048), (1024, 2048), (4096, 5120)])
def test_what_experts_have_played_fits_into_the_store(mib, expected):
    """Below the fraction at which Ray begins to spill, 0.8."""
    images = np.broadcast_to(np.uint8(0), (mib * MIB, 1, 1, 1, 1))
    empty = np.zeros(0, np.float32)
    demos = DemoSet("tabletop", images, empty, empty, empty.astype(int), (), empty.astype(int), empty.astype(bool))
    assert store_mib(Collected([demos], 1.0)) == expected
    assert store_mib(None) == 2048, "recorded episodes don't pass through it"
