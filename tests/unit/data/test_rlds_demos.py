"""Recordings as demonstrations: the same batches as from memory, frames read when needed, and a policy trained on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.config.finetune import DemoConfig, FinetuneConfig
from vlarl.data.batches import DemoBatches, Frames
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import collect_demos, open_sources
from vlarl.data.finetune import demo_statistics
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.recording import open_experts, record
from vlarl.data.rlds.demos import RldsSource
from vlarl.envs.base import ExpertFlaws
from vlarl.errors import UsageError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.processor import Processor
from vlarl.policies.tiny import init_tiny
from vlarl.run.finetune import finetune

GOLDEN = Path(__file__).parents[2] / "golden" / "rlds"
CPU = torch.device("cpu")


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of two tabletop tasks in two views of 64 pixels; noise makes none of them fail."""
    root = tmp_path_factory.mktemp("recorded")
    with open_experts("tabletop_goal", 64, ("agent", "wrist"), 1) as experts:
        record(
            experts, root, [0, 3], 2, seed=1, flaws=ExpertFlaws(action_noise=0.1), keep_failures=False, on_episode=quiet
        )
    return root


@pytest.fixture(scope="module")
def golden() -> DemoSet:
    return RldsSource(DemoConfig(), str(GOLDEN), num_images=2).collect(quiet)


def test_frames_of_failures_are_left_out_without_reading_them(golden):
    mixed = replace(golden, success=np.array([i != 2 for i in range(8)]))
    kept = mixed.successful()
    assert kept.images.shape[0] == len(kept) == 126 - 14
    at = int(golden.episode_starts[3])
    np.testing.assert_array_equal(kept.images[at - 14], golden.images[at])


def test_batches_are_the_same_kept_and_read_each_time(golden):
    policy = init_tiny("parallel", seed=0, num_images=2, norm_stats={})
    policy.add_statistics(golden.name, demo_statistics(golden))
    policy.use_statistics(None, "libero_spatial")
    rows = torch.tensor([3, 77, 125, 3])
    kept, read = Frames([golden], policy, CPU), Frames([golden], policy, CPU, max_bytes=0)
    expected = policy.process([golden.observation(int(row)) for row in rows]).pixels.permute(0, 1, 3, 4, 2)
    assert kept._held is not None and read._held is None
    assert torch.equal(kept.take(rows), expected) and torch.equal(read.take(rows), expected)
    both = Frames([golden, golden], policy, CPU, max_bytes=0)
    assert torch.equal(both.take(rows + torch.tensor([0, 126, 126, 0])), expected)


@pytest.mark.parametrize("rendered", [False, True])
def test_frames_go_through_the_policys_own_pipeline(golden, rendered):
    """A checkpoint that reads cropped images is trained on cropped images, even if they have its size already."""
    policy = init_tiny("parallel", seed=0, norm_stats={})
    policy.add_statistics(golden.name, demo_statistics(golden))
    policy.use_statistics(None, "libero_spatial")
    demos = golden
    if rendered:
        images = np.random.default_rng(0).integers(0, 256, (len(golden), 1, 56, 56, 3), dtype=np.uint8)
        demos = replace(golden, images=images)
    plain = Frames([demos], policy, CPU).take(torch.tensor([5]))
    policy.processor = Processor(policy.config, policy.tokenizer, policy.normalizer, ImagePipeline(center_crop=True))
    cropped = Frames([demos], policy, CPU).take(torch.tensor([5]))
    expected = policy.process([demos.observation(5)]).pixels.permute(0, 1, 3, 4, 2)
    assert torch.equal(cropped, expected) and not torch.equal(cropped, plain)


def test_what_was_recorded_is_what_was_played(recorded):
    (source,) = open_sources(DemoConfig(path=str(recorded)), seed=0, image_size=56, num_images=1)
    (demos,), share = collect_demos([source], quiet)
    assert share == 1.0 and demos.name == "tabletop" and len(demos.success) == 4
    assert source.action_dim == 7 and source.proprio_dim == 8 and demos.images.shape[1:] == (1, 64, 64, 3)
    assert demos.instructions == ("put the bowl on the plate", "turn on the stove")
    inside = np.ones(len(demos), dtype=bool)
    inside[demos.episode_starts + demos.episode_lengths - 1] = False
    index = np.flatnonzero(inside)
    moved = (demos.proprio[index + 1, :3] - demos.proprio[index, :3]) / 0.05
    assert np.abs(moved - demos.actions[index, :3]).std() < 0.2  # with noise of 0.1, clipped


def test_a_policy_is_trained_on_a_recording(recorded, tmp_path):
    config = FinetuneConfig.model_validate(
        {
            "run": {"root": str(tmp_path), "name": "trained", "num_threads": 1, "device": "cpu"},
            "policy": {"path": "init:tiny-oft", "num_images": 2},
            "demos": {"path": str(recorded)},
            "optim": {"steps": 12, "batch_size": 8, "lr": 1e-3, "warmup_steps": 2, "log_interval": 4},
        }
    )
    summary = finetune(config)
    assert summary.last_loss < 0.8 * summary.first_loss and summary.demo_success == 1.0
    policy = load_policy(summary.checkpoint)
    assert policy.num_images == 2
    policy.use_statistics(None, "tabletop_goal")


def test_views_that_were_not_recorded_are_refused_before_anything_starts(tmp_path):
    with open_experts("tabletop_goal", 16, ("agent",), 1) as experts:
        record(experts, tmp_path, [3], 1, seed=1, flaws=ExpertFlaws(), keep_failures=False, on_episode=quiet)
    with pytest.raises(UsageError, match=r"lacks observation/wrist_image; it has .*policy.num_images"):
        open_sources(DemoConfig(path=str(tmp_path)), 0, 56, 2)
    with pytest.raises(UsageError, match="nowhere is not a directory"):
        open_sources(DemoConfig(path=str(tmp_path / "nowhere")), 0, 56, 1)


def test_the_batches_of_a_recording_hold_what_was_done(golden):
    policy = init_tiny("parallel", seed=0, num_images=2, norm_stats={})
    policy.add_statistics(golden.name, demo_statistics(golden))
    sampler = MixtureSampler([len(golden)], [1.0], seed=3)
    batch = DemoBatches([golden], policy, CPU, sampler).batch(0, 6)
    _, rows = sampler.samples(0, 6)
    actions = policy.normalizer.unnormalize(batch.rows.actions.numpy())
    wanted = golden.chunks(rows, policy.chunk_length)
    statistics = policy.config.norm_stats["libero_spatial"]["action"]
    assert statistics["mask"] == [True] * 6 + [False]
    low, high = np.array(statistics["q01"]), np.array(statistics["q99"])
    clipped = np.where(statistics["mask"], np.clip(wanted, low, high), wanted)
    np.testing.assert_allclose(actions, clipped, atol=1e-5)
