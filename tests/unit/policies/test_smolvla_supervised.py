"""SmolVLA on demonstrations: what the loss reads, its random times, statistics of the demonstrations, the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.smolvla import FOLDER, seen, smolvla
from safetensors.torch import load_file

from vlarl.cli import main
from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.schema import LoraConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError
from vlarl.policies.smolvla import supervised
from vlarl.policies.smolvla.inputs import chain_of
from vlarl.policies.smolvla.policy import SmolVLAPolicy


def prepared() -> SmolVLAPolicy:
    policy = smolvla()
    policy.prepare_supervised(FinetunePolicyConfig(), LoraConfig(), seed=0)
    return policy


def demonstrations(policy: SmolVLAPolicy, count: int) -> tuple[supervised.DemoRows, torch.Tensor]:
    rng = np.random.default_rng(0)
    observed = [seen(i) for i in range(count)]
    actions = rng.uniform(-1, 1, (count, policy.num_steps, policy.action_dim)).astype(np.float32)
    rows = policy.demo_rows([o.instruction for o in observed], np.stack([o.proprio for o in observed]), actions)
    return rows, policy.demo_frames(np.stack([o.images for o in observed]))


def test_whole_chunks_are_trained_though_fewer_actions_are_executed(tmp_path):
    policy = prepared()
    rows, frames = demonstrations(policy, 3)
    assert rows.actions.shape == (3, 8, 12) and frames.shape == (3, 2, 24, 24, 3) and frames.dtype == torch.uint8
    policy.supervised_loss(policy.with_noise(rows, 0, range(3)), frames).backward()
    assert policy.model.action_out_proj.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in policy.model.backbone.parameters())
    policy.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["n_action_steps"] == 3


def test_times_follow_the_originals_distribution(monkeypatch):
    """Beta(1.5, 1), moved and scaled: mean 0.001 + 0.999 * 0.6 and a median of 0.5^(1/1.5)."""
    policy = prepared()
    rows, frames = demonstrations(policy, 1)
    times: list[torch.Tensor] = []

    def keep(policy, inputs, actions, noise, given):
        times.append(given)
        return given

    monkeypatch.setattr(supervised, "matching_losses", keep)
    index = torch.zeros(20_000, dtype=torch.int64)
    policy.supervised_loss(policy.with_noise(rows.rows(index), 0, range(len(index))), frames)
    (given,) = times
    assert given.mean().item() == pytest.approx(0.001 + 0.999 * 0.6, abs=0.01)
    assert given.median().item() == pytest.approx(0.001 + 0.999 * 0.5 ** (1 / 1.5), abs=0.01)
    assert given.min() >= 0.001 and given.max() <= 1.0


def test_noise_and_time_of_a_sample_are_the_same_in_any_batch():
    policy = prepared()
    rows, frames = demonstrations(policy, 3)
    whole = policy.with_noise(rows, 2**64 - 1, range(7, 10))
    part = policy.with_noise(rows.rows(slice(1, 3)), 2**64 - 1, range(8, 10))
    assert torch.equal(part.noise, whole.noise[1:]) and torch.equal(part.uniforms, whole.uniforms[1:])
    for other in (policy.with_noise(rows, 2**64 - 2, range(7, 10)), policy.with_noise(rows, 2**64 - 1, range(8, 11))):
        assert not (other.noise == whole.noise).any() and not (other.uniforms == whole.uniforms).any()
    with torch.no_grad():
        each = [policy.supervised_loss(whole.rows(slice(i, i + 1)), frames[i : i + 1]) for i in range(3)]
        together = policy.supervised_loss(whole, frames)
    torch.testing.assert_close(torch.stack(each).mean(), together, rtol=1e-5, atol=0)


def test_a_perfect_velocity_has_no_loss(monkeypatch):
    policy = prepared()
    rows, frames = demonstrations(policy, 2)
    noise, times = torch.randn(rows.actions.shape), torch.tensor([0.3, 0.8])
    inputs = policy.process([seen(0), seen(1)])
    monkeypatch.setattr(policy.model, "velocity", lambda states: noise - rows.actions)
    assert supervised.matching_losses(policy, inputs, rows.actions, noise, times).tolist() == [0.0, 0.0]


def test_a_regression_head_is_refused():
    with pytest.raises(UsageError, match="SmolVLA is trained by flow matching"):
        smolvla().prepare_supervised(FinetunePolicyConfig(actions="l1"), LoraConfig(), seed=0)


def test_the_command_trains_it_on_demonstrations(tmp_path: Path):
    flags = [
        *("--policy.path", str(FOLDER), "--run.root", str(tmp_path), "--run.name", "taught", "--run.num_threads", "1"),
        *("--demos.suites", "tabletop_spatial", "--demos.task_ids", "0", "--demos.episodes_per_task", "4"),
        *("--demos.image_size", "32", "--demos.num_workers", "1", "--run.device", "cpu"),
        *("--optim.steps", "60", "--optim.batch_size", "16", "--optim.warmup_steps", "5", "--optim.lr", "3e-3"),
        *("--optim.log_interval", "20", "--optim.save_dtype", "float32"),
    ]
    assert main(["finetune", *flags]) == 0
    rows = [json.loads(line) for line in (tmp_path / "taught" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows]
    assert losses[-1] < 0.9 * losses[0]
    before, after = (
        load_file(f / "model.safetensors") for f in (FOLDER, tmp_path / "taught" / "checkpoints" / "final")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(".vlm.model." in name for name in moved)


def test_errors_are_those_of_the_denoised_actions():
    """Of all actions of the chunk and the robot's own dimensions, from the same noise in every call."""
    policy = prepared()
    rows, frames = demonstrations(policy, 3)
    inputs = policy.process([seen(i) for i in range(3)])
    greedy = Sampling(temperature=0.0)
    actions = chain_of(policy.sample(inputs, policy.noise(range(3), greedy), greedy)).actions
    assert actions.shape == (3, policy.num_steps, policy.action_dim)
    offset = torch.tensor([0.25, -0.5, 0.0])
    rows.actions[:, :, : policy.action_dim] = actions + offset[:, None, None]
    rows.actions[:, :, policy.action_dim :] = 9.0  # padding
    errors = policy.imitation_errors(rows, frames)
    assert errors.token_accuracy is None
    bound = 256 * torch.finfo(torch.float32).eps * float(actions.abs().max() + 1)  # two passes over the same input
    torch.testing.assert_close(errors.l1, offset.abs(), rtol=0, atol=bound)
