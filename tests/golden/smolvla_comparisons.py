"""SmolVLA against lerobot's own arrays, as plain functions: the golden tests call them, mutations see them fail."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from fakes.golden_arrays import Arrays, assert_close, load_arrays
from fakes.golden_folder import golden_folder

from vlarl.policies.smolvla.checkpoint import read_policy
from vlarl.policies.smolvla.inputs import SmolVLAInputs
from vlarl.policies.smolvla.model import Prefix
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.policies.smolvla.supervised import matching_losses
from vlarl.policies.smolvla.vision import padded_pixels

FOLDER = golden_folder("smolvla-tiny")
TOLERANCE = 2e-5
IMAGES = "raw/observation.images."


@dataclass(frozen=True)
class Golden:
    """The folder's policy, and what the original computed."""

    arrays: Arrays
    policy: SmolVLAPolicy

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.arrays[name]))

    @cached_property
    def inputs(self) -> SmolVLAInputs:
        """What our processor makes of the raw instruction and state, with the raw views, which are floats."""
        views = torch.stack([self.tensor(f"raw/{view}") for view in self.policy.config.views], dim=1)
        tokens, mask = self.policy.processor.instructions([str(text) for text in self.arrays["raw/task"]])
        return SmolVLAInputs(tokens, mask, views, self.policy.processor.states(self.arrays["raw/observation.state"]))

    @cached_property
    def prefix(self) -> Prefix:
        with torch.no_grad():
            return self.policy.prefix(self.inputs)


def load() -> Golden:
    return Golden(load_arrays(FOLDER / "expected.npz"), read_policy(FOLDER, FOLDER))


def check_inputs(golden: Golden) -> None:
    """Tokens with their padding, the normalised state, and pixels as the tower reads them."""
    inputs, config = golden.inputs, golden.policy.config
    assert inputs.tokens.tolist() == golden.arrays["tokens"].tolist()
    assert inputs.token_mask.tolist() == golden.arrays["token_mask"].tolist()
    assert_close(inputs.state[:, : config.state_dim], golden.arrays["state_normalized"], TOLERANCE)
    assert not inputs.state[:, config.state_dim :].any()
    for index in range(len(config.views)):
        pixels = padded_pixels(inputs.pixels[:, index], config.tower.image)
        assert_close(pixels, golden.arrays[f"image{index}"], TOLERANCE)
        assert golden.arrays[f"image{index}_mask"].all(), "every view is shown"


def check_prefix(golden: Golden) -> None:
    """Embeddings of images, instruction and state, and which of them count."""
    model, inputs = golden.policy.model, golden.inputs
    with torch.no_grad():
        context, state = model.embed_context(inputs.pixels, inputs.tokens), model.state_proj(inputs.state)
    assert_close(torch.cat([context, state[:, None]], dim=1), golden.arrays["prefix_embeddings"], TOLERANCE)
    assert golden.prefix.mask.tolist() == golden.arrays["prefix_pad_mask"].tolist()
    alone = torch.zeros(golden.prefix.mask.shape, dtype=torch.bool)
    alone[:, -1] = True  # nothing of the prefix attends to the robot's state, which attends to everything
    assert alone.tolist() == golden.arrays["prefix_att_mask"].tolist()


def check_velocities(golden: Golden) -> None:
    """Of given noisy actions, after the prefix that was computed once."""
    index = 0
    while f"x_{index}" in golden.arrays:
        times = golden.tensor(f"t_{index}").float().expand(len(golden.inputs))
        with torch.no_grad():
            velocity, _ = golden.policy._field(golden.prefix, golden.tensor(f"x_{index}"), times)
        assert_close(velocity, golden.arrays[f"velocity_{index}"], TOLERANCE)
        index += 1
    assert index > 0


def check_actions(golden: Golden) -> None:
    """All Euler steps from given noise, by the sampler at temperature 0; normalised, and in the robot's units."""
    from vlarl.decisions import Sampling

    noise = golden.tensor("noise").flatten(1)
    rows = torch.cat([noise, torch.zeros_like(noise), torch.zeros(len(noise), 1)], dim=1)
    policy = golden.policy
    decisions = policy.sample(golden.inputs, rows, Sampling(0.0))
    assert_close(decisions.sample.actions, golden.arrays["actions_normalized"], TOLERANCE)
    assert_close(np.stack(policy.act(decisions)), golden.arrays["actions"], TOLERANCE)
    padded = golden.tensor("actions_padded")
    assert_close(padded[:, : policy.num_steps, : policy.action_dim], golden.arrays["actions_normalized"], 0.0)
    last = policy.denoising.num_steps - 1
    final = torch.cat([rows[:, :-1], torch.full((len(rows), 1), 1 - 1e-6)], dim=1)
    chain = policy.sample(golden.inputs, final, Sampling(0.0)).sample
    assert chain.index.tolist() == [last] * len(rows)
    assert_close(chain.after, golden.arrays["actions_padded"], TOLERANCE)


def flow_matching_losses(golden: Golden) -> torch.Tensor:
    """[B] the mean squared error of the velocity between given noise and normalised actions, with its padding."""
    policy = golden.policy
    actions = F.pad(golden.tensor("train_actions"), (0, policy.config.max_action_dim - policy.action_dim))
    return matching_losses(policy, golden.inputs, actions, golden.tensor("noise"), golden.tensor("train_time"))


GRADIENTS = {
    "grad_action_out_proj": "action_out_proj",
    "grad_expert_q0": "vlm_with_expert.lm_expert.layers.0.self_attn.q_proj",
    "grad_expert_k1": "vlm_with_expert.lm_expert.layers.1.self_attn.k_proj",
}


def check_training(golden: Golden) -> None:
    """The flow-matching loss and three of its gradients."""
    golden.policy.zero_grad()
    losses = flow_matching_losses(golden)
    assert_close(losses, golden.arrays["train_loss_per_sample"], TOLERANCE)
    losses.mean().backward()
    for name, module in GRADIENTS.items():
        gradient = golden.policy.model.get_submodule(module).weight.grad
        assert_close(gradient, golden.arrays[name], TOLERANCE)


CHECKS = (check_inputs, check_prefix, check_velocities, check_actions, check_training)
