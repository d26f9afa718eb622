"""What vLLM has to be told to run OpenVLA, how prompts get in and action tokens out; imports no vLLM until it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies.openvla.config import OpenVLAConfig, language_config
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import openvla_inputs
from vlarl.policies.openvla.towers import KNOWN_TOWERS

if TYPE_CHECKING:
    from vlarl.policies.openvla.policy import OpenVLAPolicy


class OpenVLAInVllm:
    """OpenVLA's side of `VllmModel`: vlarl's own model class, or vLLM's for the original 7B."""

    whole_vocabulary = False  # action ids alone

    def __init__(self, policy: OpenVLAPolicy, model_class: Literal["vlarl", "vllm"]) -> None:
        if policy.base is None:
            raise UsageError("a policy that is not on disk can't run in vLLM: save it and load it again.")
        self.config, self.model_class = policy.config, model_class
        self.folder = policy.base.folder
        self.max_positions = policy.config.max_positions
        text = language_config(policy.config.text)
        self.head_size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        self.values_per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * self.head_size
        _refuse_unsupported(policy.config, model_class, policy.base.path)

    def register(self) -> None:
        """Register vlarl's model class and its reader of config.json."""
        from vlarl.policies.openvla.vllm.plugin import register

        register()

    def arguments(self) -> dict[str, Any]:
        """vlarl's class reads config.json itself and gets prompts as ids."""
        from vlarl.policies.openvla.vllm.plugin import CONFIG_FORMAT

        given: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1}}
        if self.model_class == "vllm":
            return given
        overrides = {"num_images": self.config.num_images, "use_proprio": self.config.use_proprio}
        return given | {"config_format": CONFIG_FORMAT, "skip_tokenizer_init": True, "hf_overrides": overrides}

    def prompt(self, inputs: TensorRows, row: int, sampling: Sampling, longest: int) -> Any:
        """A row's ids with placeholders for its image tokens, its pixels and the robot's state."""
        from vlarl.policies.openvla.vllm.prompt import library_prompt, observation_prompt

        given = openvla_inputs(inputs)
        ids = given.input_ids[row][given.attention_mask[row]].tolist()
        needed = len(ids) + self.config.num_image_tokens + self.config.num_action_tokens
        if needed > longest:
            raise UsageError(f"a prompt with images and action takes {needed} tokens; the engine supports {longest}.")
        if self.model_class == "vllm":
            return library_prompt(self.config, ids, given.pixels[row])
        proprio = given.proprio[row] if given.proprio is not None and self.config.use_proprio else None
        return observation_prompt(self.config, ids, given.pixels[row], proprio)

    def sampling_arguments(self, sampling: Sampling) -> dict[str, Any]:
        """As many action tokens as a chunk has, and no other ids."""
        return {
            "max_tokens": self.config.num_action_tokens,
            "ignore_eos": True,
            "allowed_token_ids": list(range(self.config.first_action_id, self.config.vocab_size)),
        }

    def ends(self, ids: Sequence[int], sampling: Sampling) -> bool:
        """A chunk ends when it has all its tokens, which vLLM counts."""
        return False

    def decisions(
        self, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], sampling: Sampling
    ) -> Decisions:
        """Action tokens as decisions."""
        tokens = torch.tensor(ids, dtype=torch.int64)
        return token_decisions(tokens, torch.tensor(logprobs, dtype=torch.float32), self.config.action_dim)


def _refuse_unsupported(config: OpenVLAConfig, model_class: Literal["vlarl", "vllm"], path: str) -> None:
    if config.decoder != "autoregressive":
        raise UsageError(
            f"{path} decodes in parallel (OFT): every token attends to every other, which vLLM can't do. Use the torch "
            "engine: vllm.num_engines 0."
        )
    if model_class == "vllm":
        known = (KNOWN_TOWERS["vit_large_patch14_reg4_dinov2.lvd142m"], KNOWN_TOWERS["vit_so400m_patch14_siglip_224"])
        towers = tuple(replace(t, mean=k.mean, std=k.std) for t, k in zip(config.towers, known, strict=False))
        if towers != known or config.num_images != 1 or config.use_proprio or config.text["model_type"] != "llama":
            raise UsageError(
                f"{path} is not the original OpenVLA (DINOv2 and SigLIP at 224 pixels, Llama, one image, no proprio), "
                "which is all that vLLM's own class supports: use model_class 'vlarl'."
            )
