"""Supervised fine-tuning: a short version of the recipe learns, and learns the same twice."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vlarl.api import evaluate
from vlarl.config.finetune import DemoConfig, FinetuneConfig, FinetunePolicyConfig
from vlarl.config.schema import LoraConfig
from vlarl.data.batches import DemoBatches
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import collect_demos, open_sources
from vlarl.data.finetune import start
from vlarl.data.mixtures import MixtureSampler
from vlarl.data.tabletop_demos import generate_demos
from vlarl.envs.tabletop.expert import IMPERFECT
from vlarl.errors import VlarlError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.supervised import DemoRows
from vlarl.policies.tiny import init_tiny
from vlarl.run.finetune import FinetuneSummary, finetune
from vlarl.training.sft import DemoBatch, Imitation, imitate, imitation_loss


def recipe(root: Path, name: str, path: str = "init:tiny-oft", **run: int) -> FinetuneConfig:
    return FinetuneConfig.model_validate(
        {
            "run": {"root": str(root), "name": name, "num_threads": 1, "device": "cpu", **run},
            "policy": {"path": path},
            "demos": {"suites": ("tabletop_spatial",), "episodes_per_task": 2, "num_workers": 1},
            "optim": {"steps": 16, "batch_size": 16, "lr": 1e-3, "warmup_steps": 4, "log_interval": 4},
        }
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[FinetuneSummary]:
    root = tmp_path_factory.mktemp("sft")
    return [finetune(recipe(root, name)) for name in ("one", "two")]


def test_the_loss_falls_clearly_from_that_of_a_uniform_guess(runs):
    summary = runs[0]
    assert 3.5 < summary.first_loss < 6.5  # the mean of four steps from log 256 down
    assert summary.last_loss < 0.8 * summary.first_loss
    rows = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [4, 8, 12, 16]
    assert rows[-1]["train/loss"] == summary.last_loss and rows[0]["train/loss"] == summary.first_loss
    assert json.loads((summary.run_dir / "status.json").read_text())["state"] == "finished"
    assert 0 < summary.demo_success < 1
    assert any((summary.run_dir / "tensorboard").iterdir()) and (summary.run_dir / "report.html").is_file()
    checkpoints = {path.name for path in (summary.run_dir / "checkpoints").iterdir()}
    assert checkpoints == {"final", "step_000016"}  # and no validation without held-out episodes


def test_one_seed_one_model(runs):
    one, two = (load_policy(summary.checkpoint) for summary in runs)
    assert runs[0].last_loss == runs[1].last_loss
    for (name, ours), (_, theirs) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_autoregressive_recipe_learns_too(tmp_path):
    summary = finetune(recipe(tmp_path, "ar", "init:tiny-openvla"))
    assert summary.last_loss < 0.8 * summary.first_loss
    assert load_policy(summary.checkpoint).config.decoder == "autoregressive"


def test_batches_hold_what_the_demonstrator_saw_and_did():
    policy = init_tiny("parallel", seed=0)
    demos = generate_demos(["tabletop_spatial"], 1, seed=0, flaws=IMPERFECT, image_size=56)
    sampler = MixtureSampler([len(demos)], [1.0], seed=3)
    batches = DemoBatches([demos], policy, torch.device("cpu"), sampler)
    assert len(batches) == len(demos)
    batch = batches.batch(7, 5)
    inputs = batch.rows
    _, rows = sampler.samples(7, 5)
    expected = policy.process([demos.observation(int(row)) for row in rows])
    width = expected.input_ids.shape[1]
    assert torch.equal(batch.frames.permute(0, 1, 4, 2, 3), expected.pixels)
    assert torch.equal(inputs.proprio, expected.proprio)
    assert torch.equal(
        inputs.input_ids[:, :width] * expected.attention_mask, expected.input_ids * expected.attention_mask
    )
    assert torch.equal(inputs.attention_mask[:, :width], expected.attention_mask)
    assert not inputs.attention_mask[:, width:].any()
    np.testing.assert_array_equal(
        inputs.token_ids.numpy(), policy.codec.encode(demos.chunks(rows, policy.chunk_length))
    )


def test_demonstrations_show_what_the_policy_reads():
    """Two views, no robot state, and statistics that know no robot state."""
    policy = init_tiny("parallel", seed=0, num_images=2, use_proprio=False)
    del policy.config.norm_stats["tabletop"]["proprio"]
    config = DemoConfig(suites=("tabletop_spatial",), episodes_per_task=1, num_workers=1)
    demos, _ = collect_demos(open_sources(config, 0, policy.image_size, policy.num_images), note=lambda text: None)
    batches = DemoBatches(demos, policy, torch.device("cpu"), MixtureSampler([len(demos[0])], [1.0], 0))
    batch = batches.batch(0, 3)
    assert batch.frames.shape == (3, 2, policy.image_size, policy.image_size, 3) and batch.rows.proprio is None
    assert imitation_loss(policy, batch, FinetuneConfig().optim).isfinite()


def test_the_loss_of_a_uniform_policy_is_the_logarithm_of_the_bins():
    policy = init_tiny("parallel", seed=0)
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.zero_()
    demos = generate_demos(["tabletop_spatial"], 1, seed=0, flaws=IMPERFECT, image_size=56)
    sampler = MixtureSampler([len(demos)], [1.0], 0)
    batch = DemoBatches([demos], policy, torch.device("cpu"), sampler).batch(0, 4)
    config = FinetuneConfig()
    assert imitation_loss(policy, batch, config.optim).item() == pytest.approx(np.log(256), abs=1e-5)


@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_the_loss_is_that_of_each_rows_own_tokens(observation, decoder):
    policy = init_tiny(decoder, seed=3)
    inputs = policy.process([observation(i) for i in range(3)])
    count = policy.chunk_length * policy.action_dim
    places = torch.randint(0, 256, (3, count), generator=torch.Generator().manual_seed(0))
    tokens = places + policy.codec.first_id
    with torch.no_grad():
        logprobs = policy.score(inputs, tokens).logits.double().log_softmax(-1)
    expected = -float(logprobs.gather(-1, places.unsqueeze(-1)).mean())
    others = -float(logprobs.gather(-1, places.flip(0).unsqueeze(-1)).mean())
    unread = torch.zeros(3, policy.chunk_length, policy.action_dim)
    rows = DemoRows(inputs.input_ids, inputs.attention_mask, inputs.proprio, unread, tokens)
    batch = DemoBatch(rows, inputs.pixels.permute(0, 1, 3, 4, 2))
    loss = imitation_loss(policy, batch, FinetuneConfig.model_validate({"optim": {"autocast": "none"}}).optim)
    assert loss.item() == pytest.approx(expected, rel=1e-4) and abs(others - expected) > 1e-3 * expected


def test_the_regression_head_learns_and_its_checkpoint_acts(tmp_path):
    config = recipe(tmp_path, "l1").model_copy(
        update={"policy": FinetunePolicyConfig(path="init:tiny-oft", actions="l1")}
    )
    summary = finetune(config)
    assert 0.1 < summary.first_loss < 1.5  # a mean absolute error of values in [-1, 1]
    assert summary.last_loss < 0.8 * summary.first_loss
    policy = load_policy(summary.checkpoint, actions="l1")
    assert policy.acts_by_regression
    result = evaluate(summary.checkpoint, episodes=1, tasks=[0], overrides={"policy.actions": "l1"})
    assert len(result.episodes) == 1


def test_a_frozen_backbone_leaves_the_heads_to_learn(tmp_path):
    settings = FinetunePolicyConfig(path="init:tiny-oft", actions="l1", freeze="backbone")
    policy, _ = start(recipe(tmp_path, "x").model_copy(update={"policy": settings}), torch.device("cpu"))
    trained = {name.partition(".")[0] for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {"l1_head", "proprio_projector"}


def test_adapters_can_be_trained(tmp_path):
    init_tiny("parallel", seed=0, chunk_length=4).save(tmp_path / "base")
    config = recipe(tmp_path, "lora", str(tmp_path / "base")).model_copy(
        update={
            "lora": LoraConfig(enabled=True, rank=8),
            "optim": recipe(tmp_path, "x").optim.model_copy(update={"lr": 1e-2}),
        }
    )
    summary = finetune(config)
    assert summary.last_loss < 0.9 * summary.first_loss
    assert (summary.checkpoint / "adapter_model.safetensors").is_file()


class Poisoned:
    """Batches with NaN at these steps."""

    def __init__(self, batches: DemoBatches, bad: set[int]) -> None:
        self.batches, self.bad, self.number = batches, bad, 0

    def batch(self, first: int, size: int) -> DemoBatch:
        self.number += 1
        batch = self.batches.batch(first, size)
        if self.number not in self.bad:
            return batch
        return replace(batch, rows=replace(batch.rows, actions=batch.rows.actions * torch.nan))


@pytest.fixture(scope="module")
def regression() -> tuple[FinetuneConfig, DemoSet]:
    config = FinetuneConfig.model_validate(
        {"optim": {"steps": 6, "batch_size": 4, "lr": 1e-3, "warmup_steps": 0, "log_interval": 3}}
    )
    return config, generate_demos(["tabletop_spatial"], 1, seed=0, flaws=IMPERFECT, image_size=56, task_ids=[0])


def poisoned_run(regression: tuple[FinetuneConfig, DemoSet], bad: set[int]) -> tuple[OpenVLAPolicy, list[dict]]:
    config, demos = regression
    policy = init_tiny("parallel", seed=0)
    policy.attach_l1_head(0)
    policy.acts_by_regression = True
    rows: list[dict] = []
    sampler = MixtureSampler([len(demos)], [1.0], 0)
    batches = Poisoned(DemoBatches([demos], policy, torch.device("cpu"), sampler), bad)
    imitate(Imitation(policy, config.optim, batches, torch.device("cpu")), lambda step, row: rows.append(row))
    return policy, rows


def test_a_step_that_is_not_finite_is_left_out_and_counted(regression):
    policy, rows = poisoned_run(regression, {2, 4, 5})
    assert [row["train/skipped_steps"] for row in rows] == [1, 2]
    assert all(np.isfinite([row["train/loss"], row["train/grad_norm"]]).all() for row in rows)
    assert all(parameter.isfinite().all() for parameter in policy.parameters())
    spared, _ = poisoned_run(regression, {1, 2, 4, 5})
    assert any(not torch.equal(a, b) for a, b in zip(policy.parameters(), spared.parameters(), strict=True))


def test_a_run_without_any_finite_step_ends(regression):
    with pytest.raises(VlarlError, match="not finite in any of the 3 steps up to 6"):
        poisoned_run(regression, {4, 5, 6})
