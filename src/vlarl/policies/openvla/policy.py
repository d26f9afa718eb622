"""OpenVLA and OpenVLA-OFT as a `Policy`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.config.training_data import TrainingData, training_data_of, write_training_data
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies import adapters, checksums, distribution
from vlarl.policies.base import Evaluation, Level, VllmModel
from vlarl.policies.bench_model import BenchModel
from vlarl.policies.checkpoint_json import write_json
from vlarl.policies.openvla import supervised
from vlarl.policies.openvla.actions import Normalizer, UniformActionCodec
from vlarl.policies.openvla.attention import AttentionName
from vlarl.policies.openvla.components import copy_oft_heads, write_oft_heads
from vlarl.policies.openvla.config import OpenVLAConfig
from vlarl.policies.openvla.decisions import (
    RegressedActions,
    reconstruction_loss,
    regressed_decisions,
    token_decisions,
    token_ids,
)
from vlarl.policies.openvla.decoders import DECODERS, Chooser, Prefix, embed_prefix
from vlarl.policies.openvla.heads import L1ActionHead, ProprioProjector
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.inputs import OpenVLAInputs, openvla_inputs
from vlarl.policies.openvla.model import UNADAPTED, OpenVLAModel, Projector
from vlarl.policies.openvla.probe import probe_input
from vlarl.policies.openvla.processor import Processor, preprocessor_config
from vlarl.policies.openvla.vision import Block, VisionTower
from vlarl.policies.supervised import ImitationErrors, SupervisedPolicy
from vlarl.policies.value_head import ValueHead
from vlarl.policies.weight_files import MAX_SHARD_BYTES, save_module, save_weights
from vlarl.types import Action, FloatArray, Observation, UInt8Array

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenScores:
    """What the model says of given action tokens."""

    logits: torch.Tensor  # [B, K*D, num_bins] float32 over the action ids, before temperature
    values: torch.Tensor | None  # [B, V] float32, read at the state before the first action token; None without critic


class OpenVLAPolicy(SupervisedPolicy):
    """A vision-language-action model with its processor, action codec and optional heads and adapters."""

    extras = frozenset({"action_reconstruction"})
    model: OpenVLAModel

    def __init__(
        self,
        config: OpenVLAConfig,
        tokenizer: Tokenizer | None,
        unnorm_key: str | None = None,
        *,
        images: ImagePipeline = ImagePipeline(),  # noqa: B008 - frozen
        attention: AttentionName = "sdpa",
        heads_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.assets: dict[str, bytes] = {}
        self.adapter_folder: Path | None = None  # adapters of the checkpoint that a policy without weights lacks
        self.acts_by_regression = False  # actions come from the regression head, not from tokens
        self.model = OpenVLAModel(config, attention)
        self.linear_names = adapters.linear_names(self.model, UNADAPTED)
        self._heads_device = None if heads_device is None else torch.device(heads_device)  # None: the model's
        hidden = self.model.hidden_size
        self.proprio_projector = ProprioProjector(config.proprio_dim, hidden) if config.use_proprio else None
        self.value_head: ValueHead | None = None
        self.l1_head: L1ActionHead | None = None
        self.codec = UniformActionCodec(config.vocab_size, config.num_action_bins, config.action_dim)
        self._bin_values: torch.Tensor | None = None
        self.normalizer = Normalizer(config, unnorm_key)
        self.processor = Processor(config, tokenizer, self.normalizer, images)
        self.decoder = DECODERS[config.decoder](config.num_action_tokens)
        self.chunk_length = self.num_steps = config.chunk_length
        self.action_dim = config.action_dim

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def heads_device(self) -> torch.device:
        """The device of the critic and the regression head."""
        return self._heads_device or self.device

    def process(self, observations: Sequence[Observation]) -> OpenVLAInputs:
        """Prompts and pixels, on the CPU."""
        return self.processor(observations)

    def noise(self, seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[B, K*D] uniforms, one a token, each row from its own seed."""
        count = self.config.num_action_tokens
        drawn = [np.random.default_rng(seed).random(count, dtype=np.float32) for seed in seeds]
        return torch.from_numpy(np.stack(drawn))

    @torch.no_grad()
    def sample(self, inputs: TensorRows, noise: torch.Tensor, sampling: Sampling) -> Decisions:
        """Action tokens for each row, or the actions of the regression head where that one acts."""
        temperature, inputs = sampling.temperature, openvla_inputs(inputs)
        if self.acts_by_regression:
            if temperature != 0:
                raise UsageError(f"temperature {temperature} with the regression head, which does not sample: use 0.")
            return regressed_decisions(self.regress(inputs))

        def choose(logits: torch.Tensor, first: int) -> torch.Tensor:
            if temperature == 0:
                return distribution.greedy(logits)
            return distribution.sample(logits, temperature, noise[:, first : first + logits.shape[1]])

        ids, logits = self.decode(inputs, choose)
        # Greedy tokens are scored at temperature 1: at 0 every log-prob would be zero and say nothing.
        logprobs = distribution.token_logprobs(logits, ids - self.codec.first_id, temperature or 1.0)
        return token_decisions(ids, logprobs, self.action_dim)

    def evaluate(
        self,
        inputs: TensorRows,
        decisions: Decisions,
        temperature: float,
        *,
        critic_only: bool = False,
        entropy_gradient: bool = False,
        extras: Collection[str] = (),
    ) -> Evaluation:
        """Log-probs and entropies of the given tokens, and values with a critic.

        Masked tokens send no gradient, not even where their logits overflow. `critic_only`: gradients reach the value
        head and nothing before it.
        """
        ids, mask = token_ids(decisions).to(self.device), decisions.mask.to(self.device)
        scores = self.score(openvla_inputs(inputs), ids, critic_only=critic_only)
        # Masked before anything is computed: what overflows in a masked token would send 0 * inf = NaN backwards.
        logits = scores.logits.masked_fill(~mask.unsqueeze(-1), 0.0)
        indices = ids - self.codec.first_id
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = distribution.token_entropy(logits, temperature)
        found = {}
        if "action_reconstruction" in extras:
            found["action_reconstruction"] = reconstruction_loss(logits, indices, self.bin_values(), temperature)
        return Evaluation(
            logprobs=distribution.token_logprobs(logits, indices, temperature),
            entropy=entropy,
            values=scores.values,
            extras=found,
        )

    def score(self, inputs: OpenVLAInputs, token_ids: torch.Tensor, *, critic_only: bool = False) -> TokenScores:
        """Logits over the action ids for each of the given tokens [B, K*D], and values with a critic."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic_only):
            states = self._states(inputs, token_ids)
            logits = self.model.action_logits(states)
        return TokenScores(logits, None if self.value_head is None else self._value(states[:, 0]))

    def values(self, inputs: TensorRows, decisions: Decisions | None = None) -> torch.Tensor:
        """[B, V] the critic's values only; they don't depend on the decisions."""
        return self._value(self.decoder.first_state(self.model, self._prefix(openvla_inputs(inputs))))

    def act(self, decisions: Decisions) -> list[Action]:
        """The actions [K, D] of each decision, in the robot's units."""
        sample = decisions.sample
        if isinstance(sample, RegressedActions):
            actions = sample.actions.cpu().numpy()
        else:
            actions = self.codec.decode(token_ids(decisions).cpu().numpy())
        return list(self.unnormalize(actions))

    def decisions_of(self, actions: Sequence[Action]) -> Decisions:
        """Chunks [K, D] in the robot's units as action tokens: each value as the nearest bin."""
        if self.acts_by_regression:
            raise UsageError(
                "actions of the regression head have no log-probs to imitate by: use policy.actions tokens."
            )
        ids = torch.from_numpy(self.codec.encode(self.normalizer.normalize(np.stack(actions))))
        return token_decisions(ids, torch.zeros(ids.shape), self.action_dim)

    def bin_values(self) -> torch.Tensor:
        """[num_bins] the normalised value of each action bin, on the model's device; kept there, since a copy from the
        host can't be recorded."""
        if self._bin_values is None or self._bin_values.device != self.device:
            ids = np.arange(self.codec.first_id, self.codec.first_id + self.codec.num_bins)
            values = self.codec.decode(np.repeat(ids[:, None], self.action_dim, axis=1))[:, 0, 0]
            self._bin_values = torch.from_numpy(values.copy()).to(self.device)
        return self._bin_values

    @torch.no_grad()
    def decode(self, inputs: OpenVLAInputs, choose: Chooser) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens picked by `choose`: vocabulary ids [B, K*D] and the logits [B, K*D, num_bins] they came from."""
        indices, logits = self.decoder.generate(self.model, self._prefix(inputs), choose)
        return indices + self.codec.first_id, logits

    def generate(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        proprio: torch.Tensor | None = None,
        temperature: float = 1.0,
        greedy: bool = False,
        generator: torch.Generator | None = None,
    ) -> Decisions:
        """Action tokens for right-padded prompts [B, L] and pixels from our or the original's processor.

        Pixels are uint8 [B, I, 3, H, W], or normalised floats [B, channels, H, W]; proprio [B, P] is normalised. Greedy
        tokens are also returned with their log-probs at the temperature.
        """
        inputs = self._inputs(input_ids, pixel_values, proprio)

        def choose(logits: torch.Tensor, _first: int) -> torch.Tensor:
            if greedy:
                return distribution.greedy(logits)
            uniforms = torch.rand(logits.shape[:2], generator=generator).to(logits.device)
            return distribution.sample(logits, temperature, uniforms)

        ids, logits = self.decode(inputs, choose)
        logprobs = distribution.token_logprobs(logits, ids - self.codec.first_id, temperature)
        return token_decisions(ids, logprobs, self.action_dim)

    def action_logits(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        tokens: torch.Tensor,
        proprio: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, K*D, num_bins] float32 logits over the action ids, each given the tokens [B, K*D] before it."""
        return self.score(self._inputs(input_ids, pixel_values, proprio), tokens).logits

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
            raise ValueError(f"this policy reads the robot's state: give proprio, {self.config.proprio_dim} values")
        state = np.zeros(self.config.proprio_dim, np.float32) if proprio is None else np.asarray(proprio, np.float32)
        views = np.asarray(images)
        stack = views[None] if views.ndim == 3 else views
        if len(stack) > self.num_images:
            raise ValueError(
                f"{len(stack)} images for a policy that was loaded to read {self.num_images}: load it with "
                f"num_images={len(stack)}, or leave the others out"
            )
        inputs = self.process([Observation(stack, state, instruction)])
        if self.acts_by_regression:
            actions = self.regress(inputs).cpu().numpy()
        else:
            ids, _ = self.decode(inputs, lambda logits, _: distribution.greedy(logits))
            actions = self.codec.decode(ids.cpu().numpy())
        return self.unnormalize(actions[0], unnorm_key)

    def regress(self, inputs: OpenVLAInputs) -> torch.Tensor:
        """[B, K, D] normalised actions of OFT's regression head."""
        if self.l1_head is None:
            raise ValueError("the policy has no regression head: load it with actions='l1' or 'hybrid'")
        unread = torch.zeros(len(inputs), self.config.num_action_tokens, dtype=torch.int64)
        kind = next(self.l1_head.parameters()).dtype
        actions: torch.Tensor = self.l1_head(self._states(inputs, unread).to(self.heads_device, kind))
        return actions.float()

    def unnormalize(self, actions: np.ndarray, unnorm_key: str | None = None) -> FloatArray:
        """Normalised actions [..., D] -> the robot's units, by the checkpoint's statistics."""
        return self.normalizer.unnormalize(actions, unnorm_key).astype(np.float32)

    def use_statistics(self, unnorm_key: str | None, *suites: str) -> None:
        """Select the statistics for normalisation: the given key, else the suites' own, else the only one there is."""
        known = self.config.norm_stats
        own = {suite: next((k for k in (suite, f"{suite}_no_noops") if k in known), None) for suite in suites}
        try:
            keys = {suite: self.normalizer.resolve(unnorm_key or key) for suite, key in own.items()}
            first, *others = keys
            if differing := [suite for suite in others if known[keys[suite]] != known[keys[first]]]:
                raise ValueError(
                    f"the checkpoint's statistics for {first} and for {', '.join(differing)} differ, and one run "
                    f"normalises all its suites alike; name the statistics for all of them ({', '.join(sorted(known))})"
                    ", or run each suite by itself"
                )
            self.normalizer.unnorm_key = keys[first]
            self.normalizer.check(self.action_dim, self.config.proprio_dim if self.config.use_proprio else None)
        except ValueError as error:
            raise UsageError(f"policy.unnorm_key: {error}") from error

    def freeze(self, part: Literal["vision", "backbone"]) -> None:
        """Exclude the vision towers, or the whole model without its heads, from training."""
        frozen = self.model.vision_backbone if part == "vision" else self.model
        frozen.requires_grad_(False)
        left = "" if part == "backbone" else "vision_backbone."
        self.linear_names = tuple(name for name in self.linear_names if not name.startswith(left))

    def prepare_training(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Set up freezing, adapters and gradient checkpointing as configured; loaded adapters are trained further."""
        self.config = replace(self.config, untrained_tokens=self.acts_by_regression)
        if self.l1_head is not None and not self.acts_by_regression:
            self.l1_head.requires_grad_(False)
        self.adapt(settings, lora, seed)
        self._refuse_rounded_updates()
        self.model.checkpoint_layers(bool(settings.gradient_checkpointing))

    def adapt(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Freeze parts and add adapters as configured."""
        if settings.freeze != "none" and not self.has_adapter:
            self.freeze(settings.freeze)
        if settings.quantize is not None:
            from peft import prepare_model_for_kbit_training

            cast(Any, prepare_model_for_kbit_training)(self.model, use_gradient_checkpointing=False)
            if self.proprio_projector is not None:
                self.proprio_projector.float()  # like the states around the quantised layers
        if lora.adapter is not None and self.has_adapter:
            raise UsageError(
                f"lora.adapter = {lora.adapter!r}: policy.path is an adapter itself; name one of them only."
            )
        asked_for = lora.enabled or lora.adapter is not None or self.adapter_folder is not None
        if asked_for and not self.has_adapter:
            try:
                self._add_adapter(lora, seed)
            except (OSError, ValueError) as error:
                raise UsageError(f"lora: {error}") from error
        if settings.freeze == "vision":
            self.model.vision_backbone.requires_grad_(False)  # loaded adapters included

    def _refuse_rounded_updates(self) -> None:
        rounded = [name for name, p in self.named_parameters() if p.requires_grad and p.dtype != torch.float32]
        if rounded:
            raise UsageError(
                f"policy.dtype = '{str(self.model.dtype).removeprefix('torch.')}' without adapters: small updates of "
                "weights that are trained would be rounded away; set lora.enabled, or policy.dtype to float32."
            )

    @property
    def recordable(self) -> bool:
        """Whether a pass can be recorded as a CUDA graph: 8-bit layers and flash-attn synchronize with the device."""
        if self.acts_by_regression:  # its head may be on another device
            return False
        eight_bits = getattr(self.model, "is_loaded_in_8bit", False)
        return not eight_bits and cast(Any, self.model.language_model).attention != "flash_attention_2"

    @property
    def records_updates(self) -> bool:
        """Not with quantised layers, which unpack their weights in every pass, nor with a critic on another device."""
        packed = any(getattr(self.model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        return self.recordable and not packed and self.heads_device.type == self.device.type

    @property
    def fsdp_units(self) -> tuple[type[nn.Module], ...]:
        """Layers, towers and heads. The embedding, the last norm and the language model's head are used outside its own
        forward, so they stay with the root."""
        from vlarl.policies.openvla.layers import DecoderLayer

        return (DecoderLayer, Block, VisionTower, Projector, ProprioProjector, ValueHead, L1ActionHead)

    @property
    def float32_units(self) -> tuple[type[nn.Module], ...]:
        """The critic and the regression head."""
        return (ValueHead, L1ActionHead)

    def engine_weights(self) -> dict[str, nn.Parameter]:
        """The weights that engines have: all but the critic and the regression head."""
        return {name: p for name, p in super().engine_weights().items() if not name.startswith("l1_head.")}

    def unused_weights(self) -> frozenset[str]:
        """The ends of the vision towers."""
        towers = cast(Any, self.model.vision_backbone).towers
        unread = {id(p) for tower in towers for module in tower.unused for p in module.parameters()}
        return frozenset(name for name, p in self.engine_weights().items() if id(p) in unread)

    def vllm_model(self, model_class: Literal["vlarl", "vllm"]) -> VllmModel:
        """vlarl's own class inside vLLM, or vLLM's, which supports the original 7B only."""
        from vlarl.policies.openvla.vllm.serving import OpenVLAInVllm

        return OpenVLAInVllm(self, model_class)

    def bench_model(self) -> BenchModel:
        """Random inputs, counts of work and the peer."""
        from vlarl.policies.openvla.bench import OpenVLABench

        return OpenVLABench(self)

    def _add_adapter(self, lora: LoraConfig, seed: int) -> None:
        """Freeze everything and train low-rank adapters instead: fresh ones, or those of `lora.adapter`."""
        from vlarl.policies.lora import add_fresh

        if self.adapter_folder is not None:
            self.add_adapter_from(self.adapter_folder)
            return
        if self.base is None:
            raise ValueError("adapters need a base that is saved on disk: save this policy and load it again")
        if lora.adapter is not None:
            self.add_adapter_from(Path(lora.adapter))
            unknown = TrainingData(unknown=(lora.adapter,))
            self.training_data = self.training_data.joined(training_data_of(lora.adapter) or unknown)
            return
        self._freeze_all()
        add_fresh(self.model, lora, self.linear_names, self.base.path, seed)
        self.has_adapter = True

    def add_adapter_from(self, folder: Path) -> None:
        """Freeze everything but the critic and continue with a folder's adapters."""
        from vlarl.policies import lora

        assert self.base is not None
        adapters.check_base(folder, self.base.path, self.base.fingerprint)
        self._freeze_all()
        lora.add_from(self.model, folder, self.base.path)
        self.has_adapter = True

    @property
    def num_images(self) -> int:
        """Views of an observation that the policy reads."""
        return self.config.num_images

    @property
    def image_size(self) -> int:
        """Pixels of an image side, as the policy reads it."""
        return self.config.image_size

    def attach_value_head(
        self, hidden_sizes: Sequence[int] = (1024, 512), seed: int = 0, level: Level | None = None
    ) -> ValueHead:
        """Add a new critic with values at this level (`chunk`), unless the checkpoint has one that gives as many; kept
        in float32 whatever the policy's type."""
        num_values = (
            1 if level is None else {"chunk": 1, "step": self.num_steps, "token": self.config.num_action_tokens}[level]
        )
        if self.value_head is not None and (level is None or num_values == self.value_head.num_values):
            return self.value_head
        if self.value_head is not None:
            found = self.value_head.num_values
            log.warning("the checkpoint's critic gives %d values a decision, not %d: a new one", found, num_values)
        head = ValueHead(self.model.hidden_size, hidden_sizes, num_values)
        head.reset(torch.Generator().manual_seed(seed))
        self.value_head = head.to(self.heads_device)
        return self.value_head

    def detach_value_head(self) -> None:
        """Remove the critic, if there is one."""
        self.value_head = None

    def attach_l1_head(self, seed: int = 0) -> L1ActionHead:
        """Add a fresh regression head for supervised training, unless the checkpoint has one."""
        if self.l1_head is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.l1_head = L1ActionHead(self.model.hidden_size, self.action_dim).to(self.heads_device)
        return self.l1_head

    def prepare_supervised(self, settings: FinetunePolicyConfig, lora: LoraConfig, seed: int) -> None:
        """Set up training, with a regression head where that is what is trained."""
        if settings.actions == "l1":
            self.attach_l1_head(seed)
            self.acts_by_regression = True
        self.prepare_training(settings, lora, seed)

    @property
    def proprio_dim(self) -> int | None:
        """Dimensions of the robot's state; None without the proprio token."""
        return self.config.proprio_dim if self.config.use_proprio else None

    def add_statistics(self, name: str, statistics: Mapping[str, Any]) -> None:
        """Add statistics, unless there are some of this name, with or without `_no_noops`."""
        known = cast(dict[str, Mapping[str, Any]], self.config.norm_stats)
        if not {name, f"{name}_no_noops"} & set(known):
            known[name] = statistics

    def demo_rows(self, instructions: Sequence[str], proprio: FloatArray, actions: FloatArray) -> supervised.DemoRows:
        """Prompts, states and actions, normalised."""
        return supervised.demo_rows(self, instructions, proprio, actions)

    def demo_frames(self, images: Sequence[UInt8Array] | UInt8Array) -> torch.Tensor:
        """[N, I, H, W, 3] uint8."""
        return supervised.demo_frames(self, images)

    def supervised_loss(self, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the action tokens, or the regression head's error where that one acts."""
        return supervised.supervised_loss(self, rows, frames)

    def imitation_errors(self, rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
        """Of the regression head's actions where that one acts, else of the most likely tokens."""
        return supervised.imitation_errors(self, rows, frames)

    def save(self, folder: Path, dtype: torch.dtype | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the checkpoint in the original layout, safetensors and JSON only, or the adapters if there are any;
        `dtype` converts the weights."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / checksums.FILE_NAME).unlink(missing_ok=True)  # of other weights
        write_json(folder / "config.json", self.config.to_json())
        write_json(folder / "dataset_statistics.json", self.config.norm_stats)
        write_json(folder / "preprocessor_config.json", preprocessor_config(self.config))
        write_training_data(folder, self.training_data)
        for name, content in self.assets.items():
            (folder / name).write_bytes(content)
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / "tokenizer.json"))
        if self.has_adapter and self.base is not None:
            from vlarl.policies import lora

            lora.save(self.model, folder, self.base.path, self.base.fingerprint)
        else:
            save_weights(self.model.state_dict(), folder, dtype, max_shard_bytes)
            adapters.remove(folder)
        for name, head in self.components().items():
            if head is not None and (not self.has_adapter or any(p.requires_grad for p in head.parameters())):
                save_module(head, folder / f"{name}.safetensors", dtype)  # beside adapters, frozen heads are the base's

    def save_merged(self, folder: Path, adapter: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
        """Write the merged model with its heads in OFT's own files and without the critic."""
        assert self.base is not None
        copy_oft_heads(self.base.folder, folder)
        self.save(folder, dtype, max_shard_bytes=max_shard_bytes)
        write_oft_heads((adapter, self.base.folder), folder)

    @torch.no_grad()
    def probe_logits(self) -> torch.Tensor:
        """[2, K*D, num_bins] the logits of two synthetic decisions, on the host."""
        return self.score(*probe_input(self.config)).logits.cpu()

    def components(self) -> dict[str, nn.Module | None]:
        """The networks beside the model, by the names of their files; None for those that the policy lacks."""
        return {
            "proprio_projector": self.proprio_projector,
            "value_head": self.value_head,
            "action_head": self.l1_head,
        }

    def _freeze_all(self) -> None:
        """Freeze the model and its heads, except the critic and a regression head that acts, which stay trainable."""
        acting = None if self.acts_by_regression else self.l1_head
        for part in (self.model, self.proprio_projector, acting):
            if part is not None:
                part.requires_grad_(False)

    def _inputs(self, ids: torch.Tensor, pixels: torch.Tensor, proprio: torch.Tensor | None) -> OpenVLAInputs:
        mask = ids != self.config.pad_token_id
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("prompts are padded on the left or in the middle: pad them on the right")
        return OpenVLAInputs(ids, mask, pixels, proprio)

    def _prefix(self, inputs: OpenVLAInputs) -> Prefix:
        return embed_prefix(self.model, inputs.to(self.device), self.proprio_projector)

    def _states(self, inputs: OpenVLAInputs, token_ids: torch.Tensor) -> torch.Tensor:
        return self.decoder.states(self.model, self._prefix(inputs), token_ids.to(self.device))

    def _value(self, state: torch.Tensor) -> torch.Tensor:
        if self.value_head is None:
            raise ValueError("the policy has no critic: call attach_value_head first, or load a checkpoint with one")
        values: torch.Tensor = self.value_head(state.to(self.heads_device)).to(self.device)
        return values
