"""A vLLM engine of two tensor-parallel processes, in the bundle that its run has reserved. A missing vllm is a failure."""

from functools import partial

import pytest
from fakes.cluster_runs import SMALL
from fakes.text_judge import check_texts
from fakes.vlm_models import write_model

from vlarl.config.source.load import load_config
from vlarl.decisions import Sampling
from vlarl.distributed.cluster import Cluster
from vlarl.distributed.demand import Demand
from vlarl.distributed.engines import EngineGroup, build_vllm_engine
from vlarl.envs.prompts.pool import PromptPool
from vlarl.envs.prompts.shapes import ShapePrompts
from vlarl.observability.trace import NoTrace
from vlarl.policies.load import load_policy
from vlarl.types import Task

FACTOR = 4.0


@pytest.fixture
def cluster(ray_here, tmp_path):
    folder = write_model("qwen2_5_vl", tmp_path / "model", wide=True, tied=True)
    options = {name: value for name, value in SMALL.items() if not name.startswith(("policy", "env", "eval.videos"))}
    options |= {"env.suite": "prompts_shapes", "env.num_envs": 4, "rollout.max_tokens": 6, "reward.source": "length"}
    options |= {"reward.length_limit": 2, "reward.length_penalty": 0.1, "rollout.temperature": 1.0}
    options |= {"policy.path": str(folder), "distributed.backend": "ray", "vllm.num_engines": 1}
    options |= {"vllm.tensor_parallel_size": 2, "vllm.enforce_eager": True, "vllm.max_num_seqs": 4}
    config = load_config("tabletop_grpo", options)
    made = Cluster(config.distributed, tmp_path / "run" / "logs", 1, NoTrace())
    yield made, config, folder
    made.close()


def test_its_processes_start_beside_it_and_its_texts_have_the_policys_log_probs(cluster):
    made, config, folder = cluster
    demand = Demand.of(config, 1, on_gpus=False)
    made.reserve(demand)
    (place,), _, _ = made.other_placements(demand)
    engine = made.worker("engine 0", partial(build_vllm_engine, config, False), demand.engine, place)
    engine.wait_started()
    policy = load_policy(str(folder))
    seen = PromptPool(ShapePrompts(), 4).reset(range(4), [Task("prompts_shapes", i, i, i) for i in range(4)])
    inputs, sampling = policy.process(seen), Sampling(1.0, max_tokens=6)
    found = EngineGroup([engine]).generate(inputs, sampling, [1, 2, 3, 4])
    check_texts(policy, inputs, found, 1.0, FACTOR)
