"""Any language or vision-language model of transformers as a `Policy`: it reads a prompt and its decision is a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.config.training_data import TrainingData, training_data_of, write_training_data
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies import adapters, checksums
from vlarl.policies.base import BaseCheckpoint, Evaluation, Level, Policy, TokenCount, VllmModel
from vlarl.policies.value_head import ValueHead
from vlarl.policies.vlm import packing
from vlarl.policies.vlm.decisions import TextSample, text_decisions, text_sample
from vlarl.policies.vlm.generation import Stops, generate, max_tokens
from vlarl.policies.vlm.inputs import VlmInputs, vlm_inputs
from vlarl.policies.vlm.model import ModelAccess, Pass, following, max_positions, remove_noise
from vlarl.policies.vlm.processor import PromptProcessor, small_prompt
from vlarl.policies.vlm.saving import save_model
from vlarl.policies.vlm.scoring import chunk_size, score_texts
from vlarl.policies.vlm.token_passes import token_passes
from vlarl.policies.weight_files import MAX_SHARD_BYTES, save_module
from vlarl.types import Action, Observation, Prompt

VALUE_HEAD = "value_head"
DEFAULT_IMAGE_SIZE = 224
UNADAPTED = ("lm_head",)
MEDIA: dict[str, Literal["image", "video"]] = {"pixel_values": "image", "pixel_values_videos": "video"}
PROBED = ("a short text", "a text that is somewhat longer", "a text about an image")


class VlmPolicy(Policy):
    """A transformers model with its processor and optional critic and adapters.

    Its critic's values are read at the state before the first token of a text (levels chunk and step, since a text is
    one environment step), or before each token (level token).
    """

    sampling_options = frozenset(
        {"temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop", "stop_strings"},
    )
    differs_in_length = True
    num_steps = 1
    action_dim = 0
    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        processor: PromptProcessor,
        base: BaseCheckpoint | None = None,
        linear_names: tuple[str, ...] | None = None,
    ) -> None:
        """`linear_names` are the layers that adapters can be added to, if the model's own no longer say it, as
        quantised ones don't."""
        super().__init__()
        self.model = model
        self.access = ModelAccess(model)
        self.processor = processor
        self.base = base  # None: not loaded from a checkpoint
        self.assets: dict[str, bytes] = {}  # files of the tokenizer and processor, written as they were read
        self.linear_names = adapters.linear_names(model, UNADAPTED) if linear_names is None else linear_names
        self.value_head: ValueHead | None = None
        self.level: Level = "chunk"
        self.records_passes = False  # of single tokens, as CUDA graphs
        self.packing = False  # whether rows that are evaluated are laid end to end
        self.positions_at_once = chunk_size(self.access.vocabulary)  # whose logits exist at the same time

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.access.device

    @property
    def image_size(self) -> int:
        """Pixels of an image side that an environment renders; the processor takes any size."""
        vision = getattr(self.model.config, "vision_config", None)
        return int(getattr(vision, "image_size", None) or DEFAULT_IMAGE_SIZE)

    @property
    def num_images(self) -> int:
        """Views of an observation of a robot that the policy reads; prompts may have any number of images."""
        return int(self.processor.reads_images)

    @property
    def recordable(self) -> bool:
        """Texts differ in length, so their sampling as a whole can't be recorded as a CUDA graph."""
        return False

    def record_passes(self) -> None:
        """Record the passes of single tokens, where the model allows it (token_passes.py)."""
        self.records_passes = True

    def process(self, observations: Sequence[Observation]) -> VlmInputs:
        """Prompts as the model's own processor makes them, on the CPU."""
        return self.processor(observations)

    def check_sampling(self, sampling: Sampling, prompt_tokens: int = 0) -> None:
        """Refuse stop tokens that are not in the vocabulary, and texts that are longer than the model reads."""
        beyond = [index for index in sampling.stop if index >= self.access.vocabulary]
        if beyond:
            raise UsageError(
                f"rollout.stop_token_ids = {beyond}: the model's tokens have the ids 0 to {self.access.vocabulary - 1}."
            )
        self._check_positions(prompt_tokens, sampling)

    def _check_positions(self, prompt_tokens: int, sampling: Sampling) -> None:
        limit, count = max_positions(self.model.config), max_tokens(sampling)
        if limit is not None and prompt_tokens + count > limit:
            prompts = f"prompts of {prompt_tokens} tokens and " if prompt_tokens else ""
            raise UsageError(
                f"{prompts}rollout.max_tokens = {count}: the model reads {limit} tokens of prompt and text together; "
                "set rollout.max_tokens lower, or drop long prompts with prompts.max_tokens."
            )

    def prompt_length(self, prompt: Prompt) -> int:
        """Tokens of a prompt, those of its images included."""
        return self.processor.length(prompt)

    def noise(self, seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[B, max_tokens] uniforms, one a token, each row from its own seed."""
        count = max_tokens(sampling)
        drawn = [np.random.default_rng(seed).random(count, dtype=np.float32) for seed in seeds]
        return torch.from_numpy(np.stack(drawn))

    @torch.no_grad()
    def sample(self, inputs: TensorRows, noise: torch.Tensor, sampling: Sampling) -> Decisions:
        """A text for each row, with log-probs over the whole vocabulary at the temperature (see scoring.py)."""
        prefix = self.access.prefix(vlm_inputs(inputs))
        self._check_positions(int(prefix.next_position.max()), sampling)
        passes = token_passes(self.access, prefix, max_tokens(sampling), self.records_passes)
        noise, stops = noise.to(self.device), self.stops(sampling)
        sample, logprobs = generate(self.access, prefix, passes, noise, sampling, stops)
        return text_decisions(sample, logprobs)

    def stops(self, sampling: Sampling) -> Stops:
        """What ends a text."""
        return Stops((*self.stop_tokens, *sampling.stop), sampling.stop_strings, self._decode_all)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The model's own end tokens; others can be added by `Sampling.stop`."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        own = self.processor.tokenizer.eos_token_id if own is None else own
        return tuple(own) if isinstance(own, list) else () if own is None else (int(own),)

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
        """Log-probs and entropies of the tokens of given texts, and values with a critic."""
        sample = text_sample(decisions).to(self.device)
        mask = decisions.mask.to(self.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic_only):
            found = self._text_states(vlm_inputs(inputs), sample)
            width = found.states.shape[1]
            logprobs, entropy = score_texts(
                found.states,
                sample.ids[:, :width],
                mask[:, :width],
                self.access.logits,
                temperature,
                size=self.positions_at_once,
                entropy_gradient=entropy_gradient,
            )
        return Evaluation(
            logprobs=sample.padded(logprobs),
            entropy=sample.padded(entropy),
            values=None if self.value_head is None else self._values(found.states, sample),
            aux_loss=found.aux_loss,
            tokens=found.tokens,
        )

    def _text_states(self, inputs: VlmInputs, sample: TextSample) -> Pass:
        """One pass over prompts and texts; of its states [B, L, H] those before each token, up to the longest text."""
        num_rows, inputs = len(inputs), self._with_all_media(inputs)
        sample = sample.with_empty_rows(len(inputs) - len(sample))
        prefix = self.access.prefix(inputs)
        width = max(int(sample.length.max()), 1)
        read = width - 1  # the last token of a text is not read: nothing follows it
        before_last = torch.arange(read, device=self.device) < sample.length[:, None] - 1
        return self._run(
            torch.cat([prefix.ids, sample.ids[:, :read]], dim=1),
            torch.cat([prefix.mask, before_last], dim=1),
            torch.cat([prefix.positions, following(prefix, read)], dim=-1),
            self.access.widened(prefix, read),
            num_rows,
            width,
        )

    def _run(
        self,
        ids: torch.Tensor,  # [B, C]
        mask: torch.Tensor,  # [B, C] bool: what is not padding
        positions: torch.Tensor,  # [B, C] or [3, B, C]
        extra: dict[str, torch.Tensor],
        num_rows: int,
        width: int,
    ) -> Pass:
        """One pass, packed or padded; its states of the first `num_rows` rows and the last `width` columns."""
        if self.packing:
            found = packing.run_packed(self.access, ids, mask, positions, extra, width)
        else:
            found = self.access.run(ids, mask, positions, extra)
        tokens = TokenCount(int(mask[:num_rows].sum()), int(mask.sum()) if self.packing else mask.numel())
        return Pass(found.states[:num_rows, -width:], None, found.aux_loss, tokens)

    def use_packing(self) -> None:
        """Lay the rows of every later `evaluate` and `values` end to end."""
        with_images = self.processor.reads_images and self.processor.has_template
        small = [Observation.of_prompt(small_prompt("image"))] * 2
        packing.enable(self.access, self.process(small) if with_images else None)
        self.packing = True

    def _with_all_media(self, inputs: VlmInputs) -> VlmInputs:
        """The inputs, with a row at the end for each kind of media that other rows of their batch have and these don't.

        All ranks then run the same layers in every pass, and gather and reduce the same weights; and whichever rows a
        pass has, all weights get a gradient, of which these rows' part is zero.
        """
        absent = [kind for kind in MEDIA if (ragged := getattr(inputs, kind)) is not None and not ragged.counts.any()]
        fillers = [self.process([Observation.of_prompt(small_prompt(MEDIA[kind]))]) for kind in absent]
        return VlmInputs.cat([inputs, *(row.to(inputs.ids.device) for row in fillers)]) if fillers else inputs

    def values(self, inputs: TensorRows, decisions: Decisions | None = None) -> torch.Tensor:
        """[B, V] the critic's values alone; without decisions, or of decisions as a whole, the first one alone."""
        if decisions is not None and self.level == "token":
            sample = text_sample(decisions).to(self.device)
            return self._values(self._text_states(vlm_inputs(inputs), sample).states, sample)
        prefix = self.access.prefix(self._with_all_media(vlm_inputs(inputs)))
        found = self._run(prefix.ids, prefix.mask, prefix.positions, prefix.extra, len(inputs), 1)
        return self._value(found.states[:, -1])

    def text_values(self, inputs: TensorRows, decisions: Decisions) -> torch.Tensor:
        """[B] the value of each whole text: of the state before the token that ends it."""
        sample = text_sample(decisions).to(self.device)
        states = self._text_states(vlm_inputs(inputs), sample).states
        last = sample.length - 1
        return self._value(states[torch.arange(len(last), device=last.device), last]).squeeze(-1)

    def _values(self, states: torch.Tensor, sample: TextSample) -> torch.Tensor:
        if self.level != "token":
            return self._value(states[:, 0])
        attended = sample.attended()[:, : states.shape[1]]
        return sample.padded(self._value(states.masked_fill(~attended.unsqueeze(-1), 0.0)).squeeze(-1))

    def _value(self, states: torch.Tensor) -> torch.Tensor:
        """[…, H] -> […, 1]."""
        if self.value_head is None:
            raise ValueError("the policy has no critic: call attach_value_head first, or load a checkpoint with one")
        values: torch.Tensor = self.value_head(states)
        return values

    def act(self, decisions: Decisions) -> list[Action]:
        """The texts, without special tokens; a stop string is a part of its text."""
        sample = text_sample(decisions)
        rows = zip(sample.ids.tolist(), sample.length.tolist(), strict=True)
        return [
            cast(str, self.processor.tokenizer.decode(ids[:length], skip_special_tokens=True)) for ids, length in rows
        ]

    def decisions_of(self, actions: Sequence[Action]) -> Decisions:
        """These texts as the model would write them, each with the stop token at its end."""
        if not self.stop_tokens:
            raise UsageError("the model has no token that ends a text: add an eos_token to its tokenizer.")
        end = self.processor.end_of_turn(self.stop_tokens)
        encode = self.processor.tokenizer  # what looks like a token of an image, or like an end, stays plain text
        rows = [[*encode(text, add_special_tokens=False, split_special_tokens=True).input_ids, end] for text in actions]
        length = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        sample = TextSample(ids, length, torch.ones(len(rows), dtype=torch.bool))
        return text_decisions(sample, torch.zeros(ids.shape))

    def _decode_all(self, ids: Sequence[int]) -> str:
        return cast(str, self.processor.tokenizer.decode(list(ids), skip_special_tokens=False))

    def use_statistics(self, unnorm_key: str | None, *suites: str) -> None:
        """A text has no statistics."""
        if unnorm_key is not None:
            raise UsageError(f"policy.unnorm_key = {unnorm_key!r}: a text is not normalised; leave it out.")

    def freeze(self, part: Literal["vision", "backbone"]) -> None:
        """Exclude the vision tower, or the whole model without its heads, from training."""
        frozen = self._part(part)
        frozen.requires_grad_(False)
        left = {module for module in frozen.modules() if isinstance(module, nn.Linear)}
        self.linear_names = tuple(name for name in self.linear_names if self.model.get_submodule(name) not in left)

    def _part(self, part: Literal["vision", "backbone"]) -> nn.Module:
        if part == "backbone":
            return self.model
        tower = cast(nn.Module, self.model.get_encoder(modality="image"))
        if not self.processor.reads_images or tower in (self.model, self.model.base_model):
            raise UsageError("policy.freeze = 'vision': this model has no vision tower; set it to 'none'.")
        return tower

    def prepare_training(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Set up freezing, adapters and gradient checkpointing as configured; loaded adapters are trained further."""
        remove_noise(self.model)
        self.adapt(settings, lora, seed)
        if self.bits is not None and not self.has_adapter:
            raise UsageError(
                f"policy.quantize = {self.bits} without adapters: quantised weights can't be trained; set "
                "lora.enabled, or policy.quantize to null."
            )
        if any(p.requires_grad and p.dtype != torch.float32 for p in self.parameters()):
            raise UsageError(
                f"policy.dtype = '{str(self.model.dtype).removeprefix('torch.')}' without adapters: small updates of "
                "weights that are trained would be rounded away; set lora.enabled, or policy.dtype to float32."
            )
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def adapt(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Freeze parts and add adapters as configured."""
        if settings.freeze != "none" and not self.has_adapter:
            self.freeze(settings.freeze)
        if self.bits is not None:  # what is not quantised is float32, as the adapters are, and so are the states
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.float()
        if lora.adapter is not None and self.has_adapter:
            raise UsageError(
                f"lora.adapter = {lora.adapter!r}: policy.path is an adapter itself; name one of them only."
            )
        if (lora.enabled or lora.adapter is not None) and not self.has_adapter:
            try:
                self._add_adapter(lora, seed)
            except (OSError, ValueError) as error:
                raise UsageError(f"lora: {error}") from error
        if settings.freeze == "vision":
            self._part("vision").requires_grad_(False)  # loaded adapters included

    @property
    def bits(self) -> Literal[4, 8] | None:
        """Of the quantised layers; None: none is quantised."""
        model = cast(Any, self.model)
        return (
            4
            if getattr(model, "is_loaded_in_4bit", False)
            else 8
            if getattr(model, "is_loaded_in_8bit", False)
            else None
        )

    @property
    def has_aux_loss(self) -> bool:
        """Mixtures of experts report the load balance of their experts."""
        return self.access.is_mixture

    @property
    def fsdp_units(self) -> tuple[type[nn.Module], ...]:
        """The layers of the decoder and of the vision tower, and the critic. Embeddings and the head are used outside
        of the model's own forward, so they stay with the root."""
        named = set(self.model._no_split_modules or ())
        layers = {type(module) for module in self.model.modules() if type(module).__name__ in named}
        if any(isinstance(module, GradientCheckpointingLayer) for module in self.model.modules()):
            layers = {GradientCheckpointingLayer}
        return (*layers, ValueHead)

    @property
    def float32_units(self) -> tuple[type[nn.Module], ...]:
        """The critic."""
        return (ValueHead,)

    @torch.no_grad()
    def probe_logits(self) -> torch.Tensor:
        """[B, L, V] logits of a few fixed texts after prompts of different lengths, one of them with an image."""
        inputs = self.process(self.processor.probes())
        sample = text_sample(self.decisions_of(PROBED[: len(inputs)])).to(self.device)
        return self.access.logits(self._text_states(vlm_inputs(inputs), sample).states).cpu()

    def _add_adapter(self, lora_config: LoraConfig, seed: int) -> None:
        """Freeze the model and train low-rank adapters instead: fresh ones, or those of `lora.adapter`."""
        from vlarl.policies import lora

        if self.base is None:
            raise ValueError("adapters need a base that is saved on disk: save this policy and load it again")
        if lora_config.adapter is not None:
            self.add_adapter_from(Path(lora_config.adapter))
            unknown = TrainingData(unknown=(lora_config.adapter,))
            self.training_data = self.training_data.joined(training_data_of(lora_config.adapter) or unknown)
            return
        self.model.requires_grad_(False)
        lora.add_fresh(self.model, lora_config, self.linear_names, self.base.path, seed)
        self.has_adapter = True

    def add_adapter_from(self, folder: Path) -> None:
        """Freeze everything but the critic and continue with a folder's adapters."""
        from vlarl.policies import lora

        assert self.base is not None
        adapters.check_base(folder, self.base.path, self.base.fingerprint)
        self.model.requires_grad_(False)
        lora.add_from(self.model, folder, self.base.path)
        self.has_adapter = True

    def vllm_model(self, model_class: Literal["vlarl", "vllm"]) -> VllmModel:
        """How vLLM runs the model, always by its own class; UsageError if it can't."""
        from vlarl.policies.vlm.vllm.serving import VlmInVllm

        return VlmInVllm(self)

    def attach_value_head(
        self, hidden_sizes: Sequence[int] = (1024, 512), seed: int = 0, level: Level = "chunk"
    ) -> ValueHead:
        """Add a new critic, unless the checkpoint has one; kept in float32 whatever the policy's type."""
        self.level = level
        if self.value_head is None:
            head = ValueHead(self.access.hidden_size, hidden_sizes, 1)
            head.reset(torch.Generator().manual_seed(seed))
            self.value_head = head.to(self.device)
        return self.value_head

    def detach_value_head(self) -> None:
        """Remove the critic, if there is one."""
        self.value_head = None

    def save(self, folder: Path, dtype: torch.dtype | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the checkpoint as transformers does, with the files of its processor, or the adapters if there are any;
        `dtype` converts the weights."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / checksums.FILE_NAME).unlink(missing_ok=True)  # of other weights
        if self.has_adapter and self.base is not None:
            from vlarl.policies import lora

            lora.save(self.model, folder, self.base.path, self.base.fingerprint)
            self.model.config.save_pretrained(folder)
        else:
            save_model(self.model, folder, dtype, max_shard_bytes)
            adapters.remove(folder)
        for name, content in self.assets.items():
            (folder / name).write_bytes(content)
        write_training_data(folder, self.training_data)
        if self.value_head is not None:
            save_module(self.value_head, folder / f"{VALUE_HEAD}.safetensors", dtype)

    def save_merged(self, folder: Path, adapter: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
        """Write the model without its critic, which only training reads."""
        self.detach_value_head()
        self.save(folder, dtype, max_shard_bytes=max_shard_bytes)
