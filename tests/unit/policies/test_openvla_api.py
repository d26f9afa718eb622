"""What people call from Python: generate, action_logits, predict_action, and the three ways to act."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.float_error import FloatJudge, check_logprobs, exactly
from fakes.golden_arrays import load_arrays
from fakes.golden_folder import golden_folder

import vlarl
from vlarl.api import evaluate
from vlarl.config.problems import ConfigError
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Sampling
from vlarl.errors import DivergedError, UsageError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.checkpoint import has_untrained_tokens
from vlarl.policies.openvla.config import NATIVE_KEY
from vlarl.policies.tiny import init_tiny
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.run.local import launch_here

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return load_arrays(golden_folder("openvla-tiny") / "expected.npz")


@pytest.fixture(scope="module")
def golden():
    return load_policy(golden_folder("openvla-tiny"))


def tensors(expected: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(expected[k]) for k in ("input_ids", "pixel_values", "greedy_tokens"))


def test_greedy_generation_equals_the_originals(golden, expected):
    ids, pixels, tokens = tensors(expected)
    found = golden.generate(ids, pixels, greedy=True)
    assert found.sample.ids.tolist() == tokens.tolist()
    for name in expected:
        if name.startswith("logprob_action_T"):
            temperature = float(name.removeprefix("logprob_action_T"))
            hot = golden.generate(ids, pixels, greedy=True, temperature=temperature)
            np.testing.assert_allclose(hot.engine_logprobs, expected[name], atol=2e-4)


def test_action_logits_equal_the_originals_and_take_padded_prompts(golden, expected):
    ids, pixels, tokens = tensors(expected)
    logits = golden.action_logits(ids, pixels, tokens)
    assert logits.shape == expected["action_logits"].shape
    np.testing.assert_allclose(logits.detach(), expected["action_logits"], atol=2e-4)
    padded = torch.nn.functional.pad(ids, (0, 5), value=golden.config.pad_token_id)
    exact = exactly(golden, lambda p: p.action_logits(ids, pixels, tokens))
    FloatJudge.of(exact, logits).check(golden.action_logits(padded, pixels, tokens))


def test_sampling_follows_its_generator_and_reports_its_own_logprobs(golden, expected):
    ids, pixels, _ = tensors(expected)
    one, two = (golden.generate(ids, pixels, generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one.sample.ids, two.sample.ids)
    assert not torch.equal(one.sample.ids, golden.generate(ids, pixels, greedy=True).sample.ids)
    places = (one.sample.ids - golden.codec.first_id).unsqueeze(-1)
    exact, plain = (
        logits.log_softmax(-1)
        for logits in (
            exactly(golden, lambda p: p.action_logits(ids, pixels, one.sample.ids)),
            golden.action_logits(ids, pixels, one.sample.ids),
        )
    )
    judge = FloatJudge.of(exact, plain)
    replace(judge, exact=judge.exact.gather(-1, places).squeeze(-1)).check(one.engine_logprobs)


def test_predicted_actions_are_in_the_robots_units(golden, expected):
    """The golden folder has no tokenizer; this one encodes the golden prompt."""

    class Prompt:
        def encode(self, text):
            class Ids:
                ids = expected["input_ids"][0].tolist()

            return Ids

    policy = load_policy(golden_folder("openvla-tiny"))
    policy.processor.tokenizer = Prompt()
    keys = [name.removeprefix("actions_") for name in expected if name.startswith("actions_")]
    for key in keys:
        action = policy.predict_action(expected["images"][0], "anything", unnorm_key=key)
        np.testing.assert_allclose(action[0], expected[f"actions_{key}"][0], atol=1e-6)
    with pytest.raises(ValueError, match=rf"unnorm_key 'lib' is not in .*; valid: {', '.join(sorted(keys))}"):
        policy.predict_action(expected["images"][0], "anything", unnorm_key="lib")


@pytest.fixture
def with_head(tmp_path) -> Path:
    policy = init_tiny("parallel", seed=3)
    policy.attach_l1_head(seed=1)
    policy.save(tmp_path / "oft")
    return tmp_path / "oft"


def test_tokens_do_not_load_the_regression_head_and_l1_acts_by_it(with_head, observation):
    seen = observation(0)
    tokens, hybrid, l1 = (load_policy(with_head, actions=mode) for mode in ("tokens", "hybrid", "l1"))
    assert tokens.l1_head is None and hybrid.l1_head is not None
    by_tokens, by_hybrid, by_head = (
        policy.predict_action(seen.images, seen.instruction, seen.proprio) for policy in (tokens, hybrid, l1)
    )
    assert np.array_equal(by_tokens, by_hybrid), "hybrid acts by tokens"
    with torch.no_grad():
        regressed = l1.unnormalize(l1.regress(l1.process([seen]))[0].numpy())
    assert np.array_equal(by_head, regressed) and not np.allclose(by_head, by_tokens)


def test_the_engine_gives_the_regression_heads_actions_to_the_robot(with_head, observation):
    policy = load_policy(with_head, actions="l1")
    inputs = policy.process([observation(0)])
    engine = TorchEngine(policy, CPU)
    decisions = engine.generate(inputs, Sampling(0.0), [0])
    with torch.no_grad():
        regressed = policy.regress(inputs)
    assert torch.equal(decisions.sample.actions, regressed)
    assert decisions.engine_logprobs.tolist() == [[0.0] * regressed[0].numel()], "nothing was sampled"
    (chunk,) = policy.act(decisions)
    assert np.array_equal(chunk, policy.unnormalize(regressed[0].numpy())), "not rounded to bins"
    with pytest.raises(UsageError, match="does not sample"):
        engine.generate(inputs, Sampling(1.0), [0])
    result = evaluate(with_head, episodes=1, tasks=[0], overrides={"policy.actions": "l1"}, device="cpu")
    assert len(result.episodes) == 1


def test_regressed_actions_that_are_not_finite_are_refused(with_head, observation):
    policy = load_policy(with_head, actions="l1")
    with torch.no_grad():
        next(policy.l1_head.parameters()).fill_(float("nan"))
    with pytest.raises(DivergedError, match="not finite with the weights that it was loaded with"):
        TorchEngine(policy, CPU).generate(policy.process([observation(0)]), Sampling(0.0), [0])


def test_rl_on_the_regression_head_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"policy.actions = 'l1': .*no policy gradient"):
        vlarl.load_config(overrides={"policy.actions": "l1"})


def trained_on(folder: Path, actions: str | None, out: Path) -> Path:
    """The checkpoint as training of these actions saves it; None: loaded and saved, and not trained."""
    policy = load_policy(folder, actions=actions or "hybrid")
    if actions is not None:
        policy.prepare_training(ModelConfig(), LoraConfig(), 0)
    policy.save(out)
    return out


def test_rl_on_an_l1_checkpoint_warns_that_its_tokens_are_untrained(with_head, configure, caplog):
    """Ours say in config.json what was trained; OpenVLA-OFT's folders have the head only where it was."""
    launch_here(configure(policy={"path": str(with_head)})).close()
    assert "action tokens were not" not in caplog.text
    native = json.loads((with_head / "config.json").read_text())
    imitated = trained_on(with_head, "l1", with_head.parent / "imitated")
    launch_here(configure(policy={"path": str(imitated)})).close()
    assert "its action tokens were not" in caplog.text
    assert f"vlarl finetune --policy.path {imitated} --policy.actions tokens" in caplog.text
    copied = trained_on(imitated, None, with_head.parent / "copied")
    assert has_untrained_tokens(copied)
    assert not has_untrained_tokens(trained_on(copied, "hybrid", with_head.parent / "hybrid"))
    (with_head / "config.json").write_text(json.dumps({k: v for k, v in native.items() if k != NATIVE_KEY}))
    assert has_untrained_tokens(with_head), "an original folder"
    (with_head / "action_head.safetensors").unlink()
    assert not has_untrained_tokens(with_head)


def test_a_model_of_another_type_is_named_with_what_is_supported(tmp_path):
    (tmp_path / "config.json").write_text('{"type": "pi0"}')
    with pytest.raises(UsageError, match=r"model type pi0 is not supported; supported are OpenVLA and OpenVLA-OFT"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UsageError, match=r"model type vit is not supported"):
        load_policy(tmp_path)


def test_hybrid_is_trained_on_tokens_with_the_head_frozen_and_a_warning(with_head, configure, caplog):
    parts = launch_here(configure(policy={"path": str(with_head), "actions": "hybrid"}))
    assert not any(p.requires_grad for p in parts.policy.l1_head.parameters())
    assert any(p.requires_grad for p in parts.policy.model.parameters())
    assert "regression head is loaded and frozen" in caplog.text


def test_a_frozen_backbone_leaves_nothing_to_rl(configure):
    policy = {"path": "builtin:tiny-openvla", "freeze": "backbone", "use_proprio": False}
    with pytest.raises(UsageError, match="policy.freeze = 'backbone' leaves nothing for RL to train"):
        launch_here(configure(policy=policy))


def test_heads_may_live_elsewhere(observation):
    policy = load_policy("builtin:tiny-oft", heads_device="meta")
    assert policy.heads_device.type == "meta"
    head = policy.attach_value_head((8,), seed=0)
    assert {p.device.type for p in head.parameters()} == {"meta"}
    assert policy.device.type == "cpu"


def test_small_passes_of_the_engine_give_the_same_tokens(policy, observation):
    inputs = policy.process([observation(i, "open the drawer" if i % 2 else "pick up the red cube") for i in range(5)])
    seeds = [1, 2, 3, 4, 5]
    whole, parts = (TorchEngine(policy, CPU, size).generate(inputs, Sampling(1.0), seeds) for size in (None, 2))
    assert torch.equal(whole.sample.ids, parts.sample.ids)
    for found in (whole, parts):
        check_logprobs(found.engine_logprobs, policy, inputs, found.sample.ids, 1.0)


def test_recomputed_layers_train_alike(observation):
    """Gradient checkpointing through the policy, with adapters: the same gradients to the bit."""
    grads = []
    for checkpointing in (False, True):
        policy = load_policy("builtin:tiny-openvla")
        policy.prepare_training(ModelConfig(gradient_checkpointing=checkpointing), LoraConfig(enabled=True), seed=0)
        inputs = policy.process([observation(0), observation(1)])
        tokens = policy.codec.first_id + torch.arange(14).view(2, 7)
        policy.train().score(inputs, tokens).logits.square().mean().backward()
        grads.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_more_images_than_are_read_are_refused(observation):
    policy = load_policy(golden_folder("openvla-oft-tiny"))
    with pytest.raises(ValueError, match="2 images for a policy that was loaded to read 1: load it with num_images=2"):
        policy.predict_action(np.zeros((2, 56, 56, 3), np.uint8), "x", np.zeros(8, np.float32))


def test_prompts_padded_on_the_left_are_refused(golden, expected):
    ids, pixels, _ = tensors(expected)
    padded = torch.nn.functional.pad(ids, (5, 0), value=golden.config.pad_token_id)
    with pytest.raises(ValueError, match="pad them on the right"):
        golden.generate(padded, pixels)
