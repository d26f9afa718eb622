"""The second dataset of an RL run: whose demonstrations it has, for one process and for ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
from fakes.vlm_models import write_model

from vlarl.config.schema import Config
from vlarl.data.imitation import build_ptx
from vlarl.data.lerobot.demonstrations import DemonstrationWriter
from vlarl.data.recording import open_experts, record
from vlarl.data.rlds.writer import RldsWriter
from vlarl.data.tabletop_demos import generate_demos
from vlarl.envs.base import ExpertFlaws
from vlarl.errors import UsageError
from vlarl.policies.tiny import init_tiny
from vlarl.policies.vlm.checkpoint import read_policy


def config_of(**sections) -> Config:
    return Config.model_validate(sections)


EXPERTS = {"path": "experts", "episodes_per_task": 2}


class SecondRank:
    """Rank 1 of two; rank 0 has sent the given demonstrations."""

    rank, world_size = 1, 2

    def __init__(self, sent):
        self.sent = sent

    def gather(self, own):
        return [self.sent, own]


@pytest.mark.parametrize("num_images", [1, 2])
def test_experts_of_the_suite_show_every_decision_of_their_episodes(decoder, num_images):
    """In the views that the policy reads."""
    policy = init_tiny(decoder, seed=3, num_images=num_images)
    ptx = build_ptx(config_of(ptx=EXPERTS, env={"task_ids": (3, 5)}, run={"seed": 4}), policy)
    cameras = ("agent", "wrist")[:num_images]
    demos = generate_demos(
        ["tabletop_spatial"], 2, 4, ExpertFlaws(0.0, 0.0, 0.1), policy.image_size, cameras, 1, (3, 5)
    )
    assert demos.success.all() and len(ptx.samples) == len(demos)
    last = len(demos) - 1
    for index in (0, int(demos.episode_lengths[0]) - 1, last):
        observation, actions = ptx.samples.sample(index)
        np.testing.assert_array_equal(observation.images, demos.images[index])
        np.testing.assert_array_equal(observation.proprio, demos.proprio[index])
        assert observation.instruction == demos.observation(index).instruction
        np.testing.assert_array_equal(actions, demos.chunks(np.array([index]), policy.num_steps)[0])
        assert actions.shape == (policy.num_steps, 7)
    batch = ptx.batch([0, last])
    inputs = policy.process([demos.observation(0), demos.observation(last)])
    assert all((a == b).all() for a, b in zip(batch.inputs.tensors(), inputs.tensors(), strict=True))


def test_rank_0_plays_the_demonstrations_for_all_ranks():
    policy = init_tiny("parallel", seed=3)
    config = config_of(ptx=EXPERTS, env={"task_ids": (3,)})
    sent = build_ptx(config, policy).samples._demos
    there = build_ptx(config, policy, SecondRank(([[sent]], None)))
    assert there.samples._demos is sent


def lerobot(root: str | Path, name: str) -> DemonstrationWriter:
    return DemonstrationWriter(root, name, 5, False)


@pytest.mark.parametrize("new_dataset", [RldsWriter, lerobot])
def test_recorded_episodes_are_imitated_as_they_are(tmp_path, new_dataset):
    played = []
    with open_experts("tabletop_spatial", 56, ("agent",), 1) as experts:
        flaws = ExpertFlaws(action_noise=0.1)
        folder, _ = record(experts, tmp_path, [2], 2, 0, flaws, True, lambda one, *_: played.append(one), new_dataset)
    policy = init_tiny("parallel", seed=3)
    ptx = build_ptx(config_of(ptx={"path": str(folder)}), policy)
    lengths = [len(episode.actions) for episode in played]
    assert len(ptx.samples) == sum(lengths)
    observation, actions = ptx.samples.sample(lengths[0])
    np.testing.assert_array_equal(actions, played[1].actions[: policy.num_steps])
    np.testing.assert_array_equal(observation.proprio, played[1].proprio[0])
    assert [run.suite for run in policy.training_data.runs] == ["tabletop_spatial"]


def test_demonstrations_of_another_robot_are_refused_by_the_option():
    policy = init_tiny("parallel", seed=3, action_dim=4)
    with pytest.raises(UsageError, match=r"^ptx.path: the policy has 4 action dimensions.*tabletop have 7"):
        build_ptx(config_of(ptx=EXPERTS, env={"task_ids": (3,)}), policy)


def test_a_regression_head_has_nothing_to_imitate_by():
    policy = init_tiny("parallel", seed=3)
    policy.attach_l1_head()
    policy.acts_by_regression = True
    with pytest.raises(UsageError, match="regression head have no log-probs"):
        build_ptx(config_of(ptx=EXPERTS, env={"task_ids": (3,)}), policy)


def test_prompts_are_read_by_the_policy_and_their_responses_end_with_its_stop_token(tmp_path):
    policy = read_policy(write_model("qwen2_5_vl", tmp_path / "model"))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "completion": "ho"}), encoding="utf-8")
    ptx = build_ptx(config_of(env={"suite": "prompts_shapes"}, ptx={"path": str(file), "batch_size": 3}), policy)
    batch = ptx.next_batch()
    assert policy.act(batch.decisions) == ["ho"] * 3
    assert batch.decisions.token_ids()[0][-1] == policy.stop_tokens[0]
    assert str(file) in policy.training_data.unknown
