"""Datasets for a policy with one scaling that reads frames as they were recorded: pooled statistics, sizes, memory."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.rlds_shards import frames, write_dataset

from vlarl.config.finetune import FinetuneConfig
from vlarl.config.problems import ConfigError
from vlarl.config.source.load import load_config
from vlarl.data import batches
from vlarl.data.demos import collect_demos
from vlarl.data.finetune import demo_statistics
from vlarl.data.held_out import held_out_batch
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.statistics import dataset_statistics, pooled_statistics
from vlarl.errors import UsageError
from vlarl.policies.load import load_policy
from vlarl.policies.smolvla.supervised import DemoRows
from vlarl.run import finetune as command
from vlarl.types import FloatArray

CPU = torch.device("cpu")


def write(root: Path, name: str, scale: float, side: int = 16, episodes: int = 3) -> None:
    rng = np.random.default_rng(1)
    written = []
    for index in range(episodes):
        actions, states = (scale * rng.normal(size=(8, n)).astype(np.float32) for n in (7, 8))
        actions[:, 6] = index % 2
        written.append(
            {
                "action": actions,
                "observation/state": states,
                "observation/image": frames(8, 50, side, side),
                "language_instruction": [b"lift"] * 8,
            }
        )
    write_dataset(root, name, written)


def configured(root: Path, mixture: Sequence[str], **demos: object) -> FinetuneConfig:
    return FinetuneConfig.model_validate(
        {
            "run": {"root": str(root / "runs"), "name": "run", "num_threads": 1, "device": "cpu"},
            "policy": {"path": "init:tiny-smolvla", "train_backbone": True, "chunk_length": 2},
            "demos": {"path": str(root / "data"), "mixture": mixture, "image_size": 28, **demos},
            "optim": {"steps": 1, "batch_size": 4, "warmup_steps": 0, "log_interval": 1},
            "logging": {"tensorboard": False, "report": False},
        }
    )


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.1, 0.9)])
def test_pooled_statistics_are_those_of_a_set_that_is_sampled_so(weights):
    rng = np.random.default_rng(0)
    actions = [rng.normal(size=(200, 7)), 3 + 10 * rng.normal(size=(600, 7))]
    states = [rng.normal(size=(200, 8)), rng.normal(size=(600, 8))]
    found = pooled_statistics(actions, states, weights)
    counts = [round(1800 * weights[0] / 200), round(1800 * weights[1] / 600)]  # how often each frame is sampled
    sampled: list[FloatArray] = [
        np.concatenate([np.repeat(part, n, axis=0) for part, n in zip(of_both, counts, strict=True)])
        for of_both in (actions, states)
    ]
    wanted = dataset_statistics(*sampled, 2)
    for feature, values in zip(("action", "proprio"), sampled, strict=True):
        for name in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(found[feature][name], wanted[feature][name], rtol=1e-12, atol=1e-12)
        for name, q in (("q01", 0.01), ("q99", 0.99)):
            low, high = (np.quantile(values, q + d, axis=0, method="inverted_cdf") for d in (-2e-3, 2e-3))
            assert ((low <= found[feature][name]) & (found[feature][name] <= high)).all(), name


def test_a_mixture_is_normalised_by_what_is_pooled(tmp_path):
    """One dataset's statistics would make the other's actions a hundred times too large."""
    for name, scale in (("small", 0.01), ("large", 1.0)):
        write(tmp_path / "data", name, scale, episodes=8)
    config = configured(tmp_path, ("small:1", "large:3"), holdout=0.4)
    summary = command.finetune(config)
    policy = load_policy(summary.checkpoint)
    policy.use_statistics(None, "small", "large")
    _, sources = command.start(config, CPU)
    demos, _ = collect_demos(sources, lambda line: None)
    std = [part.actions.std(axis=0, dtype=np.float64) for part in demos]
    mean = [part.actions.mean(axis=0, dtype=np.float64) for part in demos]
    pooled = 0.25 * mean[0] + 0.75 * mean[1]
    between = sum(w * (s**2 + (m - pooled) ** 2) for w, s, m in zip((0.25, 0.75), std, mean, strict=True))
    wanted = torch.tensor(np.sqrt(between), dtype=torch.float32)
    torch.testing.assert_close(policy.processor.scalings.action.stats["std"], wanted)
    assert policy.statistics_of == ("small", "large")
    rows = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    assert '"val/small/l1"' in rows and '"val/large/l1"' in rows
    for part in demos:
        expected = (part.actions - pooled) / np.sqrt(between)
        held = held_out_batch(part, policy, len(part)).rows
        assert isinstance(held, DemoRows)
        np.testing.assert_allclose(held.actions[:, 0, :7], expected, atol=1e-4, rtol=1e-4)
    trained = batches.DemoBatches(demos, policy, CPU, MixtureSampler([len(part) for part in demos], [1, 3], 0))
    assert float(trained._rows.actions[:, 0, :6].abs().max()) < 6, "in the units of the pooled std"


def test_one_of_the_datasets_keeps_what_was_pooled(tmp_path, caplog):
    for name, scale in (("small", 0.01), ("large", 1.0)):
        write(tmp_path / "data", name, scale)
    config = configured(tmp_path, ("small:1", "large:3"))
    policy, sources = command.start(config, CPU)
    demos, _ = collect_demos(sources, lambda line: None)
    found = {part.name: demo_statistics(part) for part in demos}
    pooled = pooled_statistics([part.actions for part in demos], [part.proprio for part in demos], [1, 3])
    with caplog.at_level(logging.WARNING):
        policy.add_all_statistics(found, lambda: pooled)
        kept = policy.processor.scalings
        policy.add_statistics("large", found["large"])
        assert policy.processor.scalings is kept and not caplog.records
        policy.add_all_statistics(found | {"third": found["large"]}, lambda: pooled)
    assert "of small, large: those of small, large, third are used" in caplog.records[0].getMessage()


def test_frames_of_different_sizes_are_refused_before_anything_is_read(tmp_path):
    for name, side in (("one", 16), ("two", 24)):
        write(tmp_path / "data", name, 1.0, side)
    with pytest.raises(UsageError, match=r"different sizes \(one 16 x 16, two 24 x 24\)"):
        command.finetune(configured(tmp_path, ("one", "two")))
    assert not (tmp_path / "runs").exists()


def test_frames_count_with_the_size_that_they_are_kept_at(tmp_path):
    write(tmp_path / "data", "mine", 1.0, side=64, episodes=2)
    policy, sources = command.start(configured(tmp_path, ("mine",)), CPU)
    demos, _ = collect_demos(sources, lambda line: None)
    size = 16 * 64 * 64 * 3
    assert policy.image_size == 28 and size > 5 * 16 * 28**2 * 3
    fits, too_large = (batches.Frames(demos, policy, CPU, limit) for limit in (size, size - 1))
    assert fits._held is not None and fits._held.nbytes == size and too_large._held is None
    rows = torch.tensor([3, 0, 15])
    assert torch.equal(fits.take(rows), too_large.take(rows))


def test_rows_and_frames_together_are_below_the_limit(tmp_path):
    write(tmp_path / "data", "mine", 1.0, episodes=2)
    policy, sources = command.start(configured(tmp_path, ("mine",)), CPU)
    demos, _ = collect_demos(sources, lambda line: None)
    policy.add_statistics("mine", demo_statistics(demos[0]))
    size, sampler = 16 * 16 * 16 * 3, MixtureSampler([16], [1.0], 0)

    def held(limit: int) -> batches.DemoBatches:
        return batches.DemoBatches(demos, policy, CPU, sampler, limit)

    own = sum(tensor.nbytes for tensor in held(size)._rows.tensors())
    assert own > 1000
    assert held(size + own)._frames._held is not None and held(size + own - 1)._frames._held is None


def test_random_crops_are_refused_for_a_policy_that_does_not_crop():
    given = {"policy.path": "init:tiny-smolvla", "augment.enabled": True}
    with pytest.raises(ConfigError, match=r"SmolVLA has no center crop .*; set augment.crop_area to 1"):
        load_config("tabletop_base", given, schema=FinetuneConfig)
    assert load_config("tabletop_base", given | {"augment.crop_area": 1.0}, schema=FinetuneConfig).augment.enabled
    assert load_config("tabletop_base", given | {"policy.path": "init:tiny-oft"}, schema=FinetuneConfig).augment.enabled
