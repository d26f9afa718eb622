"""OpenVLA and OpenVLA-OFT behind the policy contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from vlarl.errors import UsageError
from vlarl.policies import distribution
from vlarl.policies.base import Chooser, Policy, Scores
from vlarl.policies.openvla.actions import Normalizer, UniformActionCodec
from vlarl.policies.openvla.config import NATIVE_KEY, DecoderName, OpenVLAConfig, read_config
from vlarl.policies.openvla.decoders import DECODERS, Prefix, embed_prefix
from vlarl.policies.openvla.heads import L1ActionHead, ProprioProjector, ValueHead
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.openvla.processor import Processor, preprocessor_config
from vlarl.policies.openvla.weights import (
    WEIGHTS_NAME,
    load_model,
    load_state,
    read_component,
    save_module,
    write_json,
)
from vlarl.types import FloatArray, Observation, PolicyInput, UInt8Array

# Files of the tokenizer and processor that a checkpoint carries along unread.
ASSET_NAMES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "preprocessor_config.json",
    "generation_config.json",
)


class OpenVLAPolicy(Policy):
    """A vision-language-action model with its processor, action codec and optional heads."""

    def __init__(self, config: OpenVLAConfig, tokenizer: Tokenizer | None, unnorm_key: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.assets: dict[str, bytes] = {}
        self.model = OpenVLAModel(config)
        hidden = self.model.hidden_size
        self.proprio_projector = ProprioProjector(config.proprio_dim, hidden) if config.use_proprio else None
        self.value_head: ValueHead | None = None
        self.l1_head: L1ActionHead | None = None
        self.codec = UniformActionCodec(config.vocab_size, config.num_action_bins, config.action_dim)
        self.normalizer = Normalizer(config, unnorm_key)
        self.processor = Processor(config, tokenizer, self.normalizer)
        self.decoder = DECODERS[config.decoder](config.num_action_tokens)
        self.chunk_length = config.chunk_length
        self.action_dim = config.action_dim

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.model.device

    def process(self, observations: Sequence[Observation]) -> PolicyInput:
        """Prompts and pixels, on the CPU; the same function for engine and learner."""
        return self.processor(observations)

    def score(self, inputs: PolicyInput, token_ids: torch.Tensor) -> Scores:
        """Logits over the action support for each of the given tokens [B, K*D], and values with a critic."""
        states = self.decoder.states(self.model, self._prefix(inputs), token_ids.to(self.device))
        values = None if self.value_head is None else self.value_head(states[:, 0])
        return Scores(self.model.action_logits(states), values)

    def values(self, inputs: PolicyInput) -> torch.Tensor:
        """[B] the critic's values alone, for observations that no action follows."""
        if self.value_head is None:
            raise ValueError("the policy has no critic: call attach_value_head first, or load one with value_head=…")
        values: torch.Tensor = self.value_head(self.decoder.first_state(self.model, self._prefix(inputs)))
        return values

    @torch.no_grad()
    def generate(self, inputs: PolicyInput, choose: Chooser) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens picked by `choose`: vocabulary ids [B, K*D] and the logits [B, K*D, num_bins] they came from."""
        places, logits = self.decoder.generate(self.model, self._prefix(inputs), choose)
        return places + self.codec.first_id, logits

    @torch.no_grad()
    def predict_action(
        self,
        images: UInt8Array,
        instruction: str,
        proprio: FloatArray | None = None,
        unnorm_key: str | None = None,
    ) -> FloatArray:
        """[K, D] the greedy actions in the robot's units, for uint8 images [H, W, 3] or [I, H, W, 3]."""
        if self.config.use_proprio and proprio is None:
            raise ValueError(f"this policy reads the robot's state: give proprio, {self.config.proprio_dim} numbers")
        state = np.zeros(self.config.proprio_dim, np.float32) if proprio is None else np.asarray(proprio, np.float32)
        stack = images[None] if images.ndim == 3 else images
        inputs = self.process([Observation(stack, state, instruction)])
        if self.l1_head is not None:
            actions = self.regress(inputs).cpu().numpy()
        else:
            ids, _ = self.generate(inputs, lambda logits, _: distribution.greedy(logits))
            actions = self.codec.decode(ids.cpu().numpy())
        return self.unnormalize(actions[0], unnorm_key)

    def regress(self, inputs: PolicyInput) -> torch.Tensor:
        """[B, K, D] normalised actions of OFT's regression head."""
        if self.l1_head is None:
            raise ValueError("the policy has no regression head: load it with l1_head=True")
        prefix = self._prefix(inputs)
        unread = torch.zeros(len(inputs), self.config.num_action_tokens, dtype=torch.int64, device=self.device)
        actions: torch.Tensor = self.l1_head(self.decoder.states(self.model, prefix, unread))
        return actions.float()

    def unnormalize(self, actions: np.ndarray, unnorm_key: str | None = None) -> FloatArray:
        """Normalised actions [..., D] -> the robot's units, by the checkpoint's statistics."""
        return self.normalizer.unnormalize(actions, unnorm_key).astype(np.float32)

    def use_statistics(self, unnorm_key: str | None, suite: str) -> None:
        """Fix the statistics to normalise by: the key given, else the suite's own, else the only one there is."""
        known = [key for key in (suite, f"{suite}_no_noops") if key in self.config.norm_stats]
        try:
            self.normalizer.unnorm_key = self.normalizer.resolve(unnorm_key or (known[0] if known else None))
        except ValueError as error:
            raise UsageError(f"policy.unnorm_key: {error}") from error

    def freeze_vision(self) -> None:
        """Leave the vision towers out of training."""
        self.model.vision_backbone.requires_grad_(False)

    @property
    def num_images(self) -> int:
        """Views of an observation that the policy reads."""
        return self.config.num_images

    @property
    def image_size(self) -> int:
        """Pixels of an image side, as the policy reads it."""
        return self.config.image_size

    def attach_value_head(self, hidden_sizes: Sequence[int] = (1024, 512), seed: int = 0) -> ValueHead:
        """Add a fresh critic, unless the checkpoint brought one; kept in float32 whatever the policy's type."""
        if self.value_head is not None:
            return self.value_head
        head = ValueHead(self.model.hidden_size, hidden_sizes)
        head.reset(torch.Generator().manual_seed(seed))
        self.value_head = head.to(self.device)
        return self.value_head

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the checkpoint in the original layout, safetensors and JSON only; `dtype` rounds the weights."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config.to_json())
        write_json(folder / "dataset_statistics.json", self.config.norm_stats)
        write_json(folder / "preprocessor_config.json", preprocessor_config(self.config))
        for name, content in self.assets.items():
            (folder / name).write_bytes(content)
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / "tokenizer.json"))
        save_module(self.model, folder / WEIGHTS_NAME, dtype)
        for name, head in self._components().items():
            if head is not None:
                save_module(head, folder / f"{name}.safetensors", dtype)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        decoder: DecoderName | None = None,
        chunk_length: int | None = None,
        num_images: int | None = None,
        use_proprio: bool | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        unnorm_key: str | None = None,
        value_head: Sequence[int] | None = None,
        l1_head: bool = False,
    ) -> OpenVLAPolicy:
        """Read a checkpoint folder; None takes what the folder says.

        Original OFT folders say nothing of their decoder and images: pass decoder="parallel", num_images=2. With
        `value_head` (hidden sizes) a critic is attached where the folder brings none.
        """
        folder = Path(path)
        config = read_config(folder)
        if use_proprio is None and NATIVE_KEY not in config.raw:
            use_proprio = decoder == "parallel" and read_component(folder, "proprio_projector") is not None
        config = config.with_decoder(decoder, chunk_length, num_images, use_proprio)
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        with torch.device("meta"):  # no memory is spent on weights that the file replaces
            policy = cls(config, tokenizer, unnorm_key)
        policy._fill(folder, dtype, device, l1_head=l1_head)
        if value_head is not None and policy.value_head is None:
            policy.attach_value_head(value_head)
        policy.assets = {n: (folder / n).read_bytes() for n in ASSET_NAMES if (folder / n).is_file()}
        return policy

    def _fill(self, folder: Path, dtype: torch.dtype, device: torch.device | str, *, l1_head: bool) -> None:
        load_model(self.model, folder, dtype, device)
        language = cast(Any, self.model.language_model)
        # Constants that no checkpoint holds and that the meta device left empty.
        language.model.rotary_emb = type(language.model.rotary_emb)(language.config)
        self.model.to(device)
        critic = read_component(folder, "value_head")
        if critic is not None:
            hidden = [critic.get(f"layers.{i}.weight") for i in range(len(critic))]
            widths = [weight.shape[0] for weight in hidden if weight is not None]
            self.value_head = ValueHead(self.model.hidden_size, widths)
        if l1_head:
            self.l1_head = L1ActionHead(self.model.hidden_size, self.action_dim)
        for name, head in self._components().items():
            if head is None:
                continue
            state = read_component(folder, name)
            if state is None:
                raise FileNotFoundError(f"{folder} has no {name} file (.safetensors, or OFT's --<step>_checkpoint.pt)")
            kept = torch.float32 if name == "value_head" else dtype
            load_state(head, {k: v.to(device, kept) for k, v in state.items()}, f"{folder} ({name})")

    def _components(self) -> dict[str, nn.Module | None]:
        return {
            "proprio_projector": self.proprio_projector,
            "value_head": self.value_head,
            "action_head": self.l1_head,
        }

    def _prefix(self, inputs: PolicyInput) -> Prefix:
        return embed_prefix(self.model, inputs.to(self.device), self.proprio_projector)


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer ({error}): copy or download it again") from error
