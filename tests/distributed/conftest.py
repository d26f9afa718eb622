"""Ray for the tests of this folder: one cluster for all files that need no other, and no process that nothing needs."""

import os
from types import ModuleType

import pytest

# Workers run at the same priority as everything else: deadlines also hold on a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray starts a worker for each core in advance. None of ours could be one of them: each has variables of its own.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

NUM_CPUS = 8


@pytest.fixture(scope="module")
def ray_here() -> ModuleType:
    """A cluster that the program has started itself: runs use it and leave it running, also for the next file."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
        )
    return ray


@pytest.hookimpl(trylast=True)  # after fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster once a file follows that does not use it."""
    if nextitem is not None and (nextitem.path == item.path or uses_cluster(nextitem)):
        return
    if uses_cluster(item):
        import ray

        ray.shutdown()


def uses_cluster(item: pytest.Item) -> bool:
    return "ray_here" in getattr(item, "fixturenames", ())
