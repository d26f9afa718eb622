"""Clusters of several machines: one that is lost or cut off, and one that does not share the run's folder."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import ray
from fakes.cluster_runs import SMALL, ClusterRun, assert_equal_rows, flags, rows, wait_for
from fakes.machines import Machines, cut, network, other_files, round_trip_s
from ray.util.placement_group import placement_group_table

from vlarl.callbacks import Callbacks, IterationRecord
from vlarl.config.source.load import load_config
from vlarl.errors import UsageError
from vlarl.loop import train

RAY = {"run.iterations": 2, "distributed.backend": "ray", "distributed.address": "auto", "distributed.timeout_s": 60.0}
RETRIED = "rollout/retried_episodes"
ONE_WORKER = {"distributed.num_env_workers": 1}
THREE_WORKERS = {"distributed.num_env_workers": 3}  # of environments: the learner and two more workers on the head


def configured(root: Path, name: str, **changes: object):
    return load_config("tabletop_grpo", {**SMALL, "run.root": str(root), "run.name": name, **changes})


def bundles() -> dict[str, str]:
    """The machine of each worker: those of the placement group of engines, environments and rewards, and the learner."""
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    others = max(groups, key=lambda group: len(group["bundles"]))["bundles_to_node_id"]
    learners = min(groups, key=lambda group: len(group["bundles"]))["bundles_to_node_id"]
    names = ["engine 0", *(f"environments {index}" for index in range(len(others) - 1))]
    return {name: others[index] for index, name in enumerate(names)} | {"learner 0": learners[0]}


class After(Callbacks):
    """Does something after an iteration."""

    def __init__(self, iteration: int, act: Callable[[], None]) -> None:
        self.due, self.act = iteration, act

    def iteration(self, record: IterationRecord) -> None:
        if record.iteration == self.due:
            self.act()


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> list[dict[str, float]]:
    """Rows of the run in one process."""
    root = tmp_path_factory.mktemp("calm")
    train(configured(root, "calm", **{"run.iterations": 2}))
    return rows(root / "calm")


def check_equal(run: Path, calm: list[dict[str, float]]) -> str:
    """The run is the undisturbed one but for episodes that were retried; its log."""
    ours, theirs = ([{k: v for k, v in row.items() if k != RETRIED} for row in each] for each in (rows(run), calm))
    assert_equal_rows(ours, theirs)
    return (run / "logs" / "train.log").read_text()


@pytest.fixture
def machines():
    made: list[Machines] = []

    def make(*arguments, **named) -> Machines:
        made.append(Machines(*arguments, **named))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_environments_of_a_machine_that_is_lost_are_started_on_another(machines, tmp_path, calm):
    cluster = machines(3)
    second = cluster.add(2)
    nodes: dict[str, str] = {}

    def lose() -> None:
        nodes.update(bundles())
        cluster.lose(second)
        cluster.add(2)

    train(configured(tmp_path, "lost", **RAY, **THREE_WORKERS), callbacks=After(1, lose))
    assert nodes["learner 0"] == cluster.head
    lost = {name for name, node in nodes.items() if node != cluster.head}
    assert any(name.startswith("environments") for name in lost)
    log = check_equal(tmp_path / "lost", calm)
    assert "it is run again: environments" in log


def test_a_learner_of_a_machine_that_is_lost_is_started_on_another(machines, tmp_path, calm):
    cluster = machines(4)
    second = cluster.add(5)
    nodes: dict[str, str] = {}

    def lose() -> None:
        nodes.update(bundles())
        cluster.lose(second)

    train(configured(tmp_path, "lost", **RAY, **ONE_WORKER), callbacks=After(1, lose))
    assert nodes["learner 0"] != cluster.head
    log = check_equal(tmp_path / "lost", calm)
    assert "the learners are started again from the newest checkpoint (restart 1 of 2)" in log


def test_two_runs_train_on_one_cluster_at_the_same_time(machines, tmp_path, calm):
    """Each takes its machine's worth of cores: a learner, an engine and a worker of environments."""
    cluster = machines(3)
    cluster.add(3)
    joined = SMALL | ONE_WORKER | {"run.iterations": 2, "distributed.address": cluster.raylets.address}
    runs = [ClusterRun(tmp_path, name, "tabletop_grpo", *flags(joined)) for name in ("one", "other")]
    wait_for(lambda: ray.available_resources().get("CPU", 0.0) == 0.0, 240)
    assert [run.end() for run in runs if run.process.poll() is not None] == [], "both are there at the same time"
    for run in runs:
        code, output = run.end()
        assert code == 0, output
        check_equal(run.folder, calm)
    wait_for(lambda: ray.available_resources().get("CPU") == 6.0, 30)


def test_environments_behind_a_slow_network_are_not_lost_until_it_is_cut_and_are_started_elsewhere_then(tmp_path, calm):
    """50 ms there and back, as between distant data centres: none of the timeouts take it for a loss, and the metrics of
    the evaluation and the iteration before the cut are the same, too."""
    delay = 0.025  # in either direction
    with network("vlarl16", delay) as (prefix, here, there), closing(Machines(3, address=here)) as cluster:
        second = cluster.add_within(prefix, 2, address=there)
        nodes: dict[str, str] = {}
        run = tmp_path / "lost"

        def separate() -> None:
            nodes.update(bundles())
            assert "it is run again" not in (run / "logs" / "train.log").read_text()
            assert round_trip_s(prefix, here) >= 2 * delay
            cut("vlarl16")
            cluster.add(2)

        train(configured(tmp_path, "lost", **RAY, **THREE_WORKERS), callbacks=After(1, separate))
        assert any(name.startswith("environments") and node == second for name, node in nodes.items())
        assert "it is run again: environments" in check_equal(run, calm)


def test_a_run_whose_folder_is_not_shared_is_refused_by_the_name_of_the_machine(machines, tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    cluster = machines(2)
    cluster.add_within(other_files(root), 2)
    with pytest.raises(UsageError, match=r"run\.root: \S+ runs on \S+, which does not see the run's folder") as refused:
        train(
            configured(
                root, "mine", **RAY, **{"distributed.learners_per_node": (1, 1), "distributed.num_env_workers": 1}
            )
        )
    assert "mount under the same path" in str(refused.value)
    assert list(root.iterdir()) == [], "a run that was refused leaves nothing behind"
    wait_for(lambda: ray.available_resources().get("CPU") == 4.0, 30)
