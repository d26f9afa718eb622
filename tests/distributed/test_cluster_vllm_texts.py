"""Ray, two FSDP2 ranks and a vLLM engine train a vision-language model on prompts with images, all weights or adapters.

The embedding of the tiny Qwen2.5-VL is its output layer, too. A missing vllm is a failure.
"""

import math

import pytest
import torch
from fakes.cluster_runs import SMALL, rows, wait_for
from fakes.text_judge import judges
from fakes.vlm_models import write_model

from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.shapes import ShapePrompts
from vlarl.loop import train
from vlarl.policies.load import load_policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.types import Task

FACTOR = 4.0
STOP = tuple(range(40))  # so that texts of a random model end, and differ in length
TRAINING = {name: value for name, value in SMALL.items() if not name.startswith(("policy", "env", "eval.videos"))} | {
    "env.suite": "prompts_shapes",
    "env.num_envs": 8,
    "rollout.temperature": 1.0,
    "rollout.top_p": 0.95,
    "rollout.max_tokens": 8,
    "rollout.stop_token_ids": STOP,
    "reward.source": "length",
    "reward.length_limit": 2,
    "reward.length_penalty": 0.1,
    "optim.lr": 1e-3,
    "optim.minibatches": 2,
    "distributed.learners_per_node": (2,),
    "distributed.sharding": "full",
    "distributed.sync_checksum": True,
    "distributed.num_env_workers": 1,
    "vllm.num_engines": 1,
    "vllm.enforce_eager": True,
    "vllm.max_num_seqs": 16,
}
LORA = {"lora.enabled": True, "lora.rank": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen", wide=True, tied=True)


@pytest.fixture(scope="module")
def judge(folder):
    """Float32's own errors in log-probs of the model, over texts to prompts of the suite."""
    policy, source = load_policy(str(folder)), ShapePrompts()
    pool = PromptPool(source, 10)
    seen = pool.reset(range(10), [Task("prompts_shapes", i % 5, i, i) for i in range(10)])
    inputs, sampling = policy.process(seen), Sampling(1.0, max_tokens=8, stop=STOP)
    found = TorchEngine(policy, torch.device("cpu")).generate(inputs, sampling, range(10))
    return judges(policy, inputs, found, 1.0)[0]


@pytest.mark.parametrize("trained", [{}, LORA], ids=["all weights", "adapters"])
def test_engine_and_learners_agree_after_every_sync(ray_here, folder, judge, tmp_path, trained):
    named = {"policy.path": str(folder), "run.root": str(tmp_path), "run.name": "run", "distributed.backend": "ray"}
    train(load_config(None, TRAINING | trained | named))
    updates = [row for row in rows(tmp_path / "run") if row["iteration"] > 0]
    assert len(updates) == 3
    for row in updates:  # k3 of two close log-probs is half the square of their difference
        assert math.sqrt(2 * abs(row["train/engine_mismatch_kl"])) <= FACTOR * judge.rms
        assert row["train/engine_logprob_error"] <= judge.apart(FACTOR), "the worst of all tokens"
        assert row["train/ratio_first_minibatch_error"] == 0.0
    moved = [row["train/approx_kl"] for row in updates]
    assert max(moved) > 100 * judge.rms**2, "the weights changed"
    wait_for(lambda: ray_here.available_resources().get("CPU") == 8.0, 60)
