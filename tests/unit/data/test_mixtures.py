"""Mixtures: fractions, epochs, ranks and positions, and a policy that is trained on three datasets of different schemas."""

import json
import pickle

import numpy as np
import pytest
from fakes.rlds_shards import frames, write_dataset
from fakes.three_schemas import three_schemas

from vlarl.config.dataset_folder import dataset_folders
from vlarl.config.finetune import DemoConfig, FinetuneConfig
from vlarl.config.mixtures import NAMED, WeightedDataset, parse_mixture
from vlarl.data.demos import open_sources
from vlarl.data.finetune import sampling_weights
from vlarl.data.mixtures import MixtureSampler, table
from vlarl.data.rlds.ready import READY
from vlarl.errors import UsageError
from vlarl.policies.load import load_policy
from vlarl.run.finetune import finetune

SIZES, WEIGHTS = [50, 7, 200], [0.5, 0.2, 0.3]


@pytest.fixture
def sampler() -> MixtureSampler:
    return MixtureSampler(SIZES, WEIGHTS, seed=4)


@pytest.mark.parametrize("first", [0, 512, 100_000])
def test_fractions_match_the_weights_from_the_beginning_and_later(sampler, first):
    datasets, _ = sampler.samples(first, 3000)
    np.testing.assert_allclose(np.bincount(datasets) / 3000, WEIGHTS, atol=0.02)


def test_every_frame_of_a_dataset_comes_once_an_epoch(sampler):
    datasets, rows = sampler.samples(0, 5000)
    for index, size in enumerate(SIZES):
        mine = rows[datasets == index]
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))
    first = rows[datasets == 0][:50]
    assert first.tolist() != list(range(50)) and first.tolist() != rows[datasets == 0][50:100].tolist()


def test_a_run_that_resumes_reads_what_the_undisturbed_one_would(sampler):
    """The position is all that has to be saved."""
    whole = np.stack(sampler.samples(0, 4000))
    for cut in (1, 1023, 1024, 2500):
        again = MixtureSampler(SIZES, WEIGHTS, seed=4)
        np.testing.assert_array_equal(np.stack(again.samples(cut, 4000 - cut)), whole[:, cut:])
    batches = [np.stack(sampler.samples(first, 100)) for first in range(0, 4000, 100)]
    np.testing.assert_array_equal(np.concatenate(batches, axis=1), whole)
    np.testing.assert_array_equal(np.stack(sampler.samples(300, 5)), whole[:, 300:305])  # and back


def test_a_sampler_is_the_same_in_another_process(sampler):
    sampler.samples(0, 100)
    again = pickle.loads(pickle.dumps(sampler))
    assert again.weights.tobytes() == sampler.weights.tobytes() and again.noise_seed == sampler.noise_seed
    np.testing.assert_array_equal(np.stack(again.samples(600, 900)), np.stack(sampler.samples(600, 900)))


def test_the_order_depends_on_the_seed(sampler):
    other = MixtureSampler(SIZES, WEIGHTS, seed=5)
    assert not np.array_equal(np.stack(other.samples(0, 100)), np.stack(sampler.samples(0, 100)))


def test_what_was_drawn_is_counted(sampler):
    drawn = sampler.drawn(["a", "b", "c"], 2000)
    datasets, _ = sampler.samples(0, 2000)
    assert [one.num_samples for one in drawn] == np.bincount(datasets).tolist()
    assert sum(one.fraction for one in drawn) == pytest.approx(1) and drawn[1].epochs == drawn[1].num_samples / 7
    lines = table(drawn)
    assert lines[0] == "sampled 2,000 frames:" and lines[2].split()[:2] == ["a", "50.00%"]


def test_a_mixture_is_parsed_or_refused():
    assert parse_mixture(["mine:0.5", "rest"]) == (WeightedDataset("mine", 0.5), WeightedDataset("rest", 1.0))
    named = {one.name: one.weight for one in parse_mixture(["bridge_rt_1:2", "mine:3"])}
    assert named == {"bridge_orig": 2.0, "fractal20220817_data": 2.0, "mine": 3.0}
    for entry in ("mine:", "mine:0", "mine:-1", "mine:nan", "mine:inf", ":2", "mine:a"):
        with pytest.raises(ValueError, match="is not NAME or NAME:WEIGHT"):
            parse_mixture([entry])
    with pytest.raises(ValueError, match="'bridge_orig' is in it more than once"):
        parse_mixture(["bridge_rt_1", "bridge_orig:2"])


def test_ready_mixtures_name_datasets_with_ready_mappings():
    assert all(set(mixture) <= set(READY) for mixture in NAMED.values())
    soup = NAMED["oxe_magic_soup_plus"]
    assert len(soup) == 27 and soup["droid"] == 0.06 and soup["kuka"] == 0.8341046294
    assert {"language_table", "droid"} == set(soup) - set(NAMED["oxe_magic_soup_plus_minus"])


class Sized:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def test_weights_of_ready_mixtures_are_per_frame():
    sets = [Sized(100), Sized(300)]
    own, named = ("a:3", "b:1"), ("bridge_rt_1",)
    assert sampling_weights(DemoConfig(path="x"), sets) == [100, 300]
    assert sampling_weights(DemoConfig(path="x", mixture=own), sets) == [3, 1]
    assert sampling_weights(DemoConfig(path="x", mixture=own, mixture_weights="frames"), sets) == [300, 300]
    assert sampling_weights(DemoConfig(path="x", mixture=named), sets) == [100, 300]
    assert sampling_weights(DemoConfig(path="x", mixture=named, mixture_weights="datasets"), sets) == [1, 1]


def test_missing_datasets_are_listed(tmp_path):
    (tmp_path / "toto").mkdir()
    with pytest.raises(UsageError, match=r"lacks viola, mine; it has toto\. Download them, or list"):
        dataset_folders(DemoConfig(path=str(tmp_path), mixture=("toto", "viola", "mine")))
    with pytest.raises(UsageError, match="nowhere is not a directory"):
        dataset_folders(DemoConfig(path=str(tmp_path / "nowhere"), mixture=("toto",)))


def test_a_policy_is_trained_on_three_datasets_of_different_schemas(tmp_path):
    mapping = three_schemas(tmp_path / "data")
    config = FinetuneConfig.model_validate(
        {
            "run": {"root": str(tmp_path / "runs"), "name": "mixed", "num_threads": 1, "device": "cpu"},
            "policy": {"path": "init:tiny-oft", "chunk_length": 2},
            "demos": {
                "path": str(tmp_path / "data"),
                "mapping": str(mapping),
                "mixture": ("bridge_orig:0.5", "viola:0.3", "mine:0.2"),
                "image_size": 28,
            },
            "optim": {"steps": 32, "batch_size": 32, "lr": 1e-3, "warmup_steps": 2, "log_interval": 8},
        }
    )
    summary = finetune(config)
    assert summary.last_loss < 0.7 * summary.first_loss
    rows = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text().splitlines()]
    fractions = {name: rows[-1][f"data/fraction/{name}"] for name in ("bridge_orig", "viola", "mine")}
    assert fractions == pytest.approx({"bridge_orig": 0.5, "viola": 0.3, "mine": 0.2}, abs=0.02)
    statistics = json.loads((summary.run_dir / "dataset_statistics.json").read_text())
    assert {name: one["num_transitions"] for name, one in statistics.items()} == {
        "bridge_orig": 6 * 6,  # without the first and the last step
        "viola": 4 * 8,
        "mine": 3 * 8,
    }
    for one in statistics.values():  # three ways to say the same: up or down by 0.1
        assert one["action"]["max"][2] == pytest.approx(0.1) and one["action"]["min"][2] == pytest.approx(-0.1)
        assert one["action"]["max"][6] == 1 and one["action"]["min"][6] == 0
    log = (summary.run_dir / "logs" / "train.log").read_text()
    assert "sampled 1,024 frames:" in log
    assert any(line.split()[-5:-3] == ["bridge_orig", "50.00%"] for line in log.splitlines())
    assert set(load_policy(summary.checkpoint).config.norm_stats) == {"bridge_orig", "viola", "mine"}


def test_datasets_of_one_name_are_refused(tmp_path):
    """Each is normalised by the statistics of its name."""
    libero = {
        "action": np.zeros((2, 7), np.float32),
        "observation/state": np.zeros((2, 8), np.float32),
        "observation/image": frames(2, 50),
        "language_instruction": [b"lift"] * 2,
    }
    for name in ("libero_goal", "libero_goal_no_noops"):
        write_dataset(tmp_path, name, [libero])
    config = DemoConfig(path=str(tmp_path), mixture=("libero_goal", "libero_goal_no_noops"))
    with pytest.raises(UsageError, match="several of its datasets have the name libero_goal"):
        open_sources(config, 0, 56, 1)
