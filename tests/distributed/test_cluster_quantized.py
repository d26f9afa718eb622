"""A base in 4 or 8 bits on a cluster: learner and engine quantise it alike, and adapters travel alone."""

import math

import pytest
import torch
from fakes.cluster_runs import SMALL, rows

from vlarl.config.source.load import load_config
from vlarl.loop import train
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer

TOLERANCE = 0.02  # of products in bfloat16, or of int8 activations: tests/unit/policies/test_quantize.py
FEW = {
    "run.iterations": 2,
    "env.task_ids": (0,),
    "env.num_envs": 8,
    "env.max_steps": 16,
    "rollout.num_groups": 2,
    "rollout.temperature": 1.0,
    "reward.source": "dense",
    "optim.lr": 3e-2,
    "optim.warmup_iterations": 0,
    "checkpoint.interval": 0,
    "lora.enabled": True,
    "lora.rank": 4,
    "distributed.backend": "ray",
    "distributed.num_env_workers": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose rows are whole blocks of 64, which 4 bits need."""
    raw = tiny_config("parallel").raw
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = parse_config({**raw, "text_config": {**raw["text_config"], **sizes}})
    policy = OpenVLAPolicy(config, build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(4))
    path = tmp_path_factory.mktemp("base") / "base"
    policy.save(path)
    return path


@pytest.mark.parametrize("bits", [4, 8])
def test_the_engine_follows_the_learner_after_an_update(folder, ray_here, tmp_path, bits):
    paths = {"policy.path": str(folder), "policy.quantize": bits, "run.root": str(tmp_path), "run.name": "there"}
    train(load_config("tabletop_grpo", {**SMALL, **FEW, **paths}))
    _, first, second = rows(tmp_path / "there")
    moved = math.sqrt(2 * abs(first["train/approx_kl"]))  # of a token's log-prob, by the first update
    apart = [row["train/engine_logprob_error"] for row in (first, second)]
    assert max(apart) <= TOLERANCE < moved / 3, "the engine has moved with the learner"
