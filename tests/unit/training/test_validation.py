"""Errors on held-out decisions, and when training ends because of them."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.three_schemas import three_schemas

from vlarl.cli.resume import nothing_left_to_imitate
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.source.load import load_config
from vlarl.data.held_out import held_out_batch, split_played
from vlarl.data.tabletop_demos import generate_demos
from vlarl.envs.tabletop.expert import IMPERFECT
from vlarl.errors import UsageError
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny
from vlarl.run.finetune import finetune
from vlarl.training.sft import DemoBatch, ImitationState
from vlarl.training.validation import HeldOut, Validation, is_best, is_exhausted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demos():
    return generate_demos(["tabletop_spatial"], 3, seed=0, flaws=IMPERFECT, image_size=56, task_ids=[0, 1])


def optim(**values: object):
    return FinetuneConfig.model_validate({"optim": {"batch_size": 8, "steps": 4, "warmup_steps": 0, **values}}).optim


def inputs_of(batch: DemoBatch) -> OpenVLAInputs:
    rows = batch.rows
    return OpenVLAInputs(rows.input_ids, rows.attention_mask, batch.frames.permute(0, 1, 4, 2, 3), rows.proprio)


@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_accuracy_and_error_are_those_of_the_most_likely_tokens(demos, decoder):
    policy = init_tiny(decoder, seed=2)
    batch = held_out_batch(demos, policy, 5)
    with torch.no_grad():  # what it would do first becomes what was demonstrated, so that some of it is right
        likely = policy.score(inputs_of(batch), batch.rows.token_ids).logits.argmax(-1) + policy.codec.first_id
    batch.rows.token_ids[0] = likely[0]
    row = Validation(policy, [HeldOut("tabletop", 1.0, batch)], optim(), seed=0, device=CPU).measure()
    assert row["val/token_accuracy"] >= 1 / 5 / likely.shape[1]
    with torch.no_grad():
        logits = policy.score(inputs_of(batch), batch.rows.token_ids).logits.double().numpy()
    ids = logits.argmax(-1) + policy.codec.first_id
    # The centre of an action's bin, without the codec: 255 bins over [-1, 1], and a higher id is a smaller action.
    bins = np.clip(policy.codec.vocab_size - ids - 1, 0, 254)
    actions = (-1 + (bins + 0.5) * 2 / 255).reshape(5, -1, policy.action_dim)
    assert row["val/token_accuracy"] == pytest.approx((ids == batch.rows.token_ids.numpy()).mean(), abs=1e-6)
    assert row["val/l1"] == pytest.approx(np.abs(actions - batch.rows.actions.numpy()).mean(), abs=1e-6)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = batch.rows.token_ids.numpy() - policy.codec.first_id
    expected = -np.take_along_axis(log_probs, wanted[..., None], -1).mean()
    assert row["val/loss"] == pytest.approx(expected, rel=1e-4)
    assert policy.training


def test_a_policy_that_does_what_was_demonstrated_has_no_error(demos):
    policy = init_tiny("parallel", seed=2)
    batch = held_out_batch(demos, policy, 4)

    class Perfect(OpenVLAPolicy):
        def regress(self, inputs: OpenVLAInputs) -> torch.Tensor:
            return batch.rows.actions[: len(inputs)] + 0.25

    policy.attach_l1_head(0)
    policy.acts_by_regression = True
    policy.__class__ = Perfect
    row = Validation(policy, [HeldOut("tabletop", 1.0, batch)], optim(), seed=0, device=CPU).measure()
    assert row == pytest.approx({"val/loss": 0.25, "val/l1": 0.25}, abs=1e-6)  # tokens are not what acts


def test_decisions_are_evenly_spaced_over_the_episodes(demos):
    policy = init_tiny("parallel", seed=2)
    batch = held_out_batch(demos, policy, 7)
    frames = policy.demo_frames([demos.images[index] for index in range(len(demos))])
    places = [int((frames == frame).flatten(1).all(dim=1).nonzero()[-1]) for frame in batch.frames]
    assert places[0] == 0 or len(set(places)) == 7
    gaps = [b - a for a, b in pairwise(np.linspace(0, len(demos) - 1, 7).round())]
    assert max(gaps) - min(gaps) <= 1 and len(batch) == 7
    assert len(held_out_batch(demos, policy, 10**6)) == len(demos)


def test_means_over_datasets_have_their_weights_and_passes_do_not_matter(demos):
    policy = init_tiny("parallel", seed=2)
    few, many = (held_out_batch(demos, policy, count) for count in (3, 9))
    parts = [HeldOut("few", 0.75, few), HeldOut("many", 0.25, many)]
    row = Validation(policy, parts, optim(), seed=0, device=CPU).measure()
    for name in ("loss", "l1", "token_accuracy"):
        assert row[f"val/{name}"] == pytest.approx(0.75 * row[f"val/few/{name}"] + 0.25 * row[f"val/many/{name}"])
        assert row[f"val/few/{name}"] != row[f"val/many/{name}"] or name == "token_accuracy"  # 0 of a fresh policy
        alone = Validation(policy, parts[1:], optim(), seed=0, device=CPU).measure()
        assert alone == pytest.approx(
            {f"val/{key}": row[f"val/many/{key}"] for key in ("loss", "l1", "token_accuracy")}
        )
    split = Validation(policy, parts, optim(microbatch_size=2), seed=0, device=CPU).measure()
    assert split == pytest.approx(row, rel=1e-4)


def test_it_leaves_the_random_numbers_of_training_alone(demos):
    policy = init_tiny("parallel", seed=2)
    batch = held_out_batch(demos, policy, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()

    class Sampling(OpenVLAPolicy):
        def supervised_loss(self, rows, frames):
            return torch.rand(())

    policy.__class__ = Sampling
    validation = Validation(policy, [HeldOut("tabletop", 1.0, batch)], optim(), seed=3, device=CPU)
    first, second = validation.measure(), validation.measure()
    assert torch.equal(torch.get_rng_state(), before) and first == second


def test_patience_counts_validations_without_a_new_lowest():
    state = ImitationState()
    found = []
    for step, value in enumerate((3.0, 2.0, 2.0, 1.5, 1.6, 1.7), start=1):
        state.iteration = step
        found.append((is_best(state, value), is_exhausted(state, 2), is_exhausted(state, None)))
    assert [best for best, _, _ in found] == [True, True, False, True, False, False]  # as low is not lower
    assert [stop for _, stop, _ in found] == [False] * 5 + [True]
    assert not any(stop for _, _, stop in found) and (state.best, state.best_step) == (1.5, 4)


def recorded(root: Path, **sections: dict) -> FinetuneConfig:
    mapping = three_schemas(root / "data")
    plain: dict[str, dict] = {
        "run": {"root": str(root / "runs"), "name": "x", "num_threads": 1, "device": "cpu"},
        "policy": {"path": "init:tiny-oft", "chunk_length": 2},
        "demos": {"path": str(root / "data" / "mine"), "mapping": str(mapping), "image_size": 28, "holdout": 0.4},
        "optim": {"steps": 12, "batch_size": 4, "warmup_steps": 2, "log_interval": 4},
        "logging": {"tensorboard": False, "report": False},
    }
    return FinetuneConfig.model_validate(
        {name: plain.get(name, {}) | sections.get(name, {}) for name in plain | sections}
    )


def test_training_ends_early_and_keeps_the_best(tmp_path, monkeypatch):
    values = iter((3.0, 2.0, 2.5, 2.2))
    monkeypatch.setattr(Validation, "measure", lambda self: {"val/l1": next(values)})
    config = recorded(tmp_path, validation={"interval": 2, "patience": 2})
    summary = finetune(config)
    checkpoints = tmp_path / "runs" / "x" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"best_validation", "final", "step_000008"}
    assert json.loads((checkpoints / "best_validation" / "metadata.json").read_text()) == {
        "training_step": 4,
        "val/l1": 2.0,
    }
    assert (summary.best_step, summary.best_l1) == (4, 2.0)
    rows = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [2, 4, 6, 8]  # one row a step, though two things were due
    assert ["train/loss" in row for row in rows] == [False, True, False, True]
    status = json.loads((summary.run_dir / "status.json").read_text())
    assert (status["state"], status["iteration"]) == ("finished", 8)
    again = finetune(config, resume=summary.run_dir)  # nothing is left, and nothing is measured
    assert (again.best_step, again.checkpoint) == (4, summary.checkpoint)


def test_the_best_policy_of_steps_that_are_taken_again_is_not_the_best(tmp_path, monkeypatch):
    """From step 4, of whose policy nothing is left: that of step 6 has replaced it."""
    checkpoint = {"interval": 2, "keep": 9}
    values = iter((3.0, 2.0, 1.0, 1.5, 1.5, 1.5, 5.0, 6.0, 7.0, 8.0))
    monkeypatch.setattr(Validation, "measure", lambda self: {"val/l1": next(values)})
    config = recorded(tmp_path, validation={"interval": 2}, checkpoint=checkpoint)
    summary = finetune(config)
    assert (summary.best_step, summary.best_l1) == (6, 1.0)
    again = finetune(config, resume=summary.run_dir, checkpoint=summary.run_dir / "checkpoints" / "step_000004")
    assert (again.best_step, again.best_l1) == (6, 5.0)
    noted = json.loads((again.run_dir / "checkpoints" / "best_validation" / "metadata.json").read_text())
    assert noted == {"training_step": 6, "val/l1": 5.0}


def test_a_run_that_was_stopped_by_patience_says_so_when_it_is_resumed(tmp_path, monkeypatch):
    values = iter((3.0, 4.0))
    monkeypatch.setattr(Validation, "measure", lambda self: {"val/l1": next(values)})
    summary = finetune(recorded(tmp_path, validation={"interval": 2, "patience": 1}))
    config = load_config(summary.run_dir / "config.yaml", schema=FinetuneConfig)
    said = nothing_left_to_imitate(summary.run_dir, None, config, [])
    assert said is not None and "was stopped after 4 steps, by validation.patience = 1" in said
    assert said.endswith("--validation.patience 2")
    with pytest.raises(UsageError, match="--optim.lr would have no effect"):
        nothing_left_to_imitate(summary.run_dir, None, config, ["--optim.lr"])
    longer = config.model_copy(update={"validation": config.validation.model_copy(update={"patience": 2})})
    assert nothing_left_to_imitate(summary.run_dir, None, longer, ["--validation.patience"]) is None


def test_patience_without_a_held_out_episode_is_refused(tmp_path):
    config = recorded(tmp_path, demos={"holdout": 1e-9}, validation={"patience": 1})
    with pytest.raises(UsageError, match="there is no held-out episode to validate on"):
        finetune(config)


def test_without_patience_a_run_trains_without_validation(tmp_path, capsys):
    summary = finetune(recorded(tmp_path, demos={"holdout": 1e-9}))
    assert summary.best_step is None and "holds out none of its episodes" in capsys.readouterr().out


def test_demonstrations_of_experts_are_held_out_too(tmp_path, capsys):
    config = FinetuneConfig.model_validate(
        {
            "run": {"root": str(tmp_path), "name": "played", "num_threads": 1, "device": "cpu"},
            "demos": {"suites": ("tabletop_spatial",), "episodes_per_task": 2, "num_workers": 1, "holdout": 0.3},
            "optim": {"steps": 2, "batch_size": 4, "warmup_steps": 0, "log_interval": 2},
            "validation": {"samples": 10},
            "logging": {"tensorboard": False, "report": False},
        }
    )
    summary = finetune(config)
    (row,) = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {"val/loss", "val/l1", "val/token_accuracy", "train/loss"} <= row.keys()
    assert "tabletop: validated on 10 decisions of" in capsys.readouterr().out


def test_an_episode_is_trained_on_or_held_out_whole(demos):
    source = SimpleNamespace(name="tabletop")
    (kept,), held_out = split_played([demos], [source], 0.4)
    out = held_out["tabletop"]
    assert 0 < len(out.success) < len(demos.success)
    ends = np.cumsum(demos.episode_lengths)
    episodes = {
        demos.actions[end - length : end].tobytes() for end, length in zip(ends, demos.episode_lengths, strict=True)
    }
    found = []
    for part in (kept, out):
        ends = np.cumsum(part.episode_lengths)
        assert ends[-1] == len(part) == len(part.images) == len(part.proprio)
        found.append({part.actions[e - n : e].tobytes() for e, n in zip(ends, part.episode_lengths, strict=True)})
    assert found[0] | found[1] == episodes and not found[0] & found[1]
    (fewer,), _ = split_played([kept], [source], 0.4)
    assert len(fewer.success) == len(kept.success), "what is trained on stays trained on when others are gone"
    assert split_played([demos], [source], 0.0) == ([demos], {})
    with pytest.raises(UsageError, match="leaves no demonstration of tabletop to train on"):
        split_played([demos], [source], 1.0)
