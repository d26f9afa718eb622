"""SmolVLA as a `Policy`: its decision is a denoised chunk of actions, of which one denoising step is stochastic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.config.training_data import TrainingData, training_data_of
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import UsageError
from vlarl.policies import adapters
from vlarl.policies.base import Evaluation, Level
from vlarl.policies.flow import (
    ChainSample,
    NoiseHead,
    denoise,
    gaussian_entropy,
    gaussian_logprobs,
)
from vlarl.policies.smolvla import saving, supervised
from vlarl.policies.smolvla.config import SmolVLAConfig
from vlarl.policies.smolvla.conventions import Conventions, StoredConventions, from_signed
from vlarl.policies.smolvla.inputs import SmolVLAInputs, chain_decisions, chain_of, smolvla_inputs
from vlarl.policies.smolvla.layers import DecoderLayer, ExpertLayer, ExpertLinear, ExpertNorm
from vlarl.policies.smolvla.model import Prefix, SmolVLAModel
from vlarl.policies.smolvla.pipelines import with_statistics
from vlarl.policies.smolvla.processor import Processor
from vlarl.policies.smolvla.statistics import OLD_STATISTICS, Scalings
from vlarl.policies.smolvla.vision import Connector, TowerLayer, VisionTower
from vlarl.policies.supervised import ImitationErrors, SupervisedPolicy
from vlarl.policies.value_head import ValueHead
from vlarl.policies.weight_files import MAX_SHARD_BYTES
from vlarl.types import Action, FloatArray, Observation, UInt8Array

log = logging.getLogger(__name__)


class SmolVLAPolicy(SupervisedPolicy):
    """A vision-language model with an action expert, its processor, and optional critic, noise head and adapters."""

    model: SmolVLAModel
    has_compute_dtype = False
    keeps_frame_size = True

    def __init__(self, config: SmolVLAConfig, processor: Processor, conventions: Conventions) -> None:
        super().__init__()
        self.config = config
        self.processor = processor
        self.denoising = conventions.denoising
        self.conventions = conventions
        self.num_steps, self.action_dim = conventions.num_steps, config.action_dim
        self.model = SmolVLAModel(config)
        self.value_head: ValueHead | None = None
        self.noise_head: NoiseHead | None = None
        if conventions.denoising.kind == "noise":
            self.noise_head = NoiseHead(config.expert.hidden, config.max_action_dim)
        self.files: dict[str, bytes] = {}  # beside the weights, which are written as they were read
        self.unread: dict[str, torch.Tensor] = {}  # in the weight file: what SmolVLA does not use
        self.stored: dict[str, torch.dtype] = {}  # the type of each tensor of the weight file
        self.statistics_of: tuple[str, ...] = ()  # the datasets whose statistics they are, as far as that is known
        self.flips_gripper = conventions.flips_gripper(())

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def image_size(self) -> int:
        """Pixels of a side of the views that the checkpoint was made for."""
        return max(self.config.view_shape)

    @property
    def num_images(self) -> int:
        """Views of an observation that the policy reads."""
        return self.processor.num_images

    def process(self, observations: Sequence[Observation]) -> SmolVLAInputs:
        """Instructions, pixels and states, on the CPU."""
        return self.processor(observations)

    def noise(self, seeds: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """[B, 2*C*M + 1] where the chain begins, what its stochastic step adds, and which step that is."""
        count = 2 * self.config.chunk_size * self.config.max_action_dim
        rows = []
        for seed in seeds:
            generator = np.random.default_rng(seed)
            normals = generator.standard_normal(count, dtype=np.float32)
            rows.append(np.append(normals, generator.random(1, dtype=np.float32)))
        return torch.from_numpy(np.stack(rows))

    @torch.no_grad()
    def sample(self, inputs: TensorRows, noise: torch.Tensor, sampling: Sampling) -> Decisions:
        """A denoised chunk for each row; at temperature 0 by the ODE, with its log-probs at temperature 1."""
        shape = (-1, 2, self.config.chunk_size, self.config.max_action_dim)
        start, added = noise[:, :-1].view(shape).to(self.device).float().unbind(dim=1)
        index = self.denoising.chosen(noise[:, -1].to(self.device))
        prefix = self.prefix(smolvla_inputs(inputs))
        chain = denoise(
            lambda x, t: self._field(prefix, x, t), start, added, index, self.denoising, sampling.temperature
        )
        std = self._executed(chain.std) * (sampling.temperature or 1.0)
        logprobs = gaussian_logprobs(self._executed(chain.after), self._executed(chain.mean), std)
        actions = chain.end[:, : self.num_steps, : self.action_dim].contiguous()
        return chain_decisions(ChainSample(chain.before, chain.after, index, actions), logprobs)

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
        """Log-probs and entropies of the stochastic steps of given chains, and values with a critic."""
        chain, mask = chain_of(decisions).to(self.device), decisions.mask.to(self.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic_only):
            prefix = self.prefix(smolvla_inputs(inputs))
            velocity, learned = self._field(prefix, chain.before, self.denoising.times(chain.index))
            mean, std = self.denoising.gaussian(chain.before, velocity, chain.index, learned)
            taken, mean, std = (self._executed(x) for x in (chain.after, mean, std.expand_as(mean)))
            # Masked before anything is computed: what overflows in a masked element would send 0 * inf = NaN backwards.
            mean, std = torch.where(mask, mean, taken), torch.where(mask, std, 1.0) * temperature
            logprobs = gaussian_logprobs(taken, mean, std)
            entropy = gaussian_entropy(std if entropy_gradient else std.detach())
        values = None if self.value_head is None else self._value(self._critic_state(prefix, critic_only))
        return Evaluation(logprobs=logprobs, entropy=entropy, values=values)

    def values(self, inputs: TensorRows, decisions: Decisions | None = None) -> torch.Tensor:
        """[B, V] the critic's values only; they don't depend on the decisions."""
        return self._value(self._critic_state(self.prefix(smolvla_inputs(inputs)), critic_only=False))

    def act(self, decisions: Decisions) -> list[Action]:
        """The actions [K, D] of each decision, in the robot's units."""
        actions = self.processor.scalings.action_array(chain_of(decisions).actions)
        if self.flips_gripper:
            actions[..., -1] = from_signed(actions[..., -1])
        return list(actions)

    def prefix(self, inputs: SmolVLAInputs) -> Prefix:
        """What the expert reads of observations."""
        there = inputs.to(self.device)
        return self.model.prefix(there.pixels, there.tokens, there.token_mask, there.state)

    def _field(
        self, prefix: Prefix, noisy: torch.Tensor, times: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Velocities [B, C, M], and the learned std where there is one."""
        states = self.model.expert_states(prefix, noisy, times)
        std = None
        if self.noise_head is not None:
            std = self.noise_head(states.float(), self.denoising.min_std, self.denoising.max_std)
        return self.model.velocity(states).float(), std

    def _executed(self, values: torch.Tensor) -> torch.Tensor:
        """[B, K*D] of [B, C, M]: the actions that are executed, in the robot's dimensions."""
        return values[:, : self.num_steps, : self.action_dim].flatten(1)

    def _critic_state(self, prefix: Prefix, critic_only: bool) -> torch.Tensor:
        """[B, H] before the decision: the language model's at the robot's state, or the expert's mean over the actions
        when the chain begins, at the mean of its noise."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic_only):
            if self.conventions.critic == "vlm":
                return prefix.state
            rows = len(prefix.mask)
            start = torch.zeros(rows, self.config.chunk_size, self.config.max_action_dim, device=self.device)
            states = self.model.expert_states(prefix, start, torch.ones(rows, device=self.device))
            return states[:, : self.num_steps].mean(dim=1)

    def _value(self, state: torch.Tensor) -> torch.Tensor:
        if self.value_head is None:
            raise ValueError("the policy has no critic: call attach_value_head first, or load a checkpoint with one")
        values: torch.Tensor = self.value_head(state)
        return values

    def use_statistics(self, unnorm_key: str | None, *suites: str) -> None:
        """Check the only statistics that the checkpoint has, and convert its gripper to that of these suites."""
        if unnorm_key is not None:
            raise UsageError(
                f"policy.unnorm_key = {unnorm_key!r}: a SmolVLA checkpoint has one set of statistics; leave it out."
            )
        if problem := self.processor.scalings.problem(self.config):
            raise UsageError(
                f"policy.path: {problem}. Take a checkpoint that was trained on data of this robot, with its "
                "policy_preprocessor.json and policy_postprocessor.json."
            )
        self.flips_gripper = self.conventions.flips_gripper(suites)

    def freeze(self, part: Literal["vision", "backbone"]) -> None:
        """Exclude the vision tower, or the whole model without its heads, from training."""
        frozen = (
            (self.model.backbone.vision_model, self.model.backbone.connector) if part == "vision" else (self.model,)
        )
        for module in frozen:
            module.requires_grad_(False)

    def prepare_training(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Train the expert, and the vision-language model where that is configured; or adapters of them."""
        self.adapt(settings, lora, seed)
        if any(p.requires_grad and p.dtype != torch.float32 for p in self.parameters()):
            raise UsageError(
                "policy.train_backbone with policy.dtype = 'bfloat16': small updates of weights that are trained would "
                "be rounded away; set lora.enabled, or policy.dtype to float32."
            )
        self.model.checkpointing = bool(settings.gradient_checkpointing)

    def adapt(self, settings: ModelConfig, lora: LoraConfig, seed: int) -> None:
        """Freeze parts and add adapters as configured."""
        if lora.adapter is not None and self.has_adapter:
            raise UsageError(
                f"lora.adapter = {lora.adapter!r}: policy.path is an adapter itself; name one of them only."
            )
        if not self.has_adapter:
            self.model.backbone.requires_grad_(settings.train_backbone)
            if settings.freeze != "none":
                self.freeze(settings.freeze)
        if (lora.enabled or lora.adapter is not None) and not self.has_adapter:
            try:
                self._add_adapter(lora, seed)
            except (OSError, ValueError) as error:
                raise UsageError(f"lora: {error}") from error

    def _add_adapter(self, settings: LoraConfig, seed: int) -> None:
        """Freeze the model and train low-rank adapters of what would be trained: fresh ones, or those of a folder."""
        from vlarl.policies import lora

        if self.base is None:
            raise ValueError("adapters need a base that is saved on disk: save this policy and load it again")
        if settings.adapter is not None:
            self.add_adapter_from(Path(settings.adapter))
            unknown = TrainingData(unknown=(settings.adapter,))
            self.training_data = self.training_data.joined(training_data_of(settings.adapter) or unknown)
            return
        names = adapters.linear_names(self.model, ("connector.modality_projection.proj",))
        self.model.requires_grad_(False)
        lora.add_fresh(self.model, settings, names, self.base.path, seed)
        self.has_adapter = True

    def add_adapter_from(self, folder: Path) -> None:
        """Freeze everything but the heads and continue with a folder's adapters."""
        from vlarl.policies import lora

        assert self.base is not None
        adapters.check_base(folder, self.base.path, self.base.fingerprint)
        self.model.requires_grad_(False)
        lora.add_from(self.model, folder, self.base.path)
        self.has_adapter = True

    @property
    def fsdp_units(self) -> tuple[type[nn.Module], ...]:
        """Layers, towers, projections and heads; embeddings and the language model's last norm stay with the root."""
        return (DecoderLayer, TowerLayer, VisionTower, Connector, ExpertLinear, ExpertNorm, ValueHead, NoiseHead)

    @property
    def float32_units(self) -> tuple[type[nn.Module], ...]:
        """The expert, since bfloat16 loses updates of the size that RL makes, and the heads."""
        return (ExpertLayer, ExpertLinear, ExpertNorm, ValueHead, NoiseHead)

    def attach_value_head(self, hidden_sizes: Sequence[int], seed: int, level: Level = "chunk") -> ValueHead:
        """Add a new critic with values at this level, unless the checkpoint has one that gives as many."""
        num_values = {"chunk": 1, "step": self.num_steps, "token": self.num_steps * self.action_dim}[level]
        width = self.critic_width
        found = self.value_head
        if found is not None and found.num_values == num_values and found.reads == width:
            return found
        if found is not None:
            log.warning(
                "the checkpoint's critic gives %d values of a state, not %d: a new one", found.num_values, num_values
            )
        head = ValueHead(width, hidden_sizes, num_values)
        head.reset(torch.Generator().manual_seed(seed))
        self.value_head = head.to(self.device)
        return self.value_head

    @property
    def critic_width(self) -> int:
        """Of the state that the critic reads."""
        return self.config.text.hidden if self.conventions.critic == "vlm" else self.config.expert.hidden

    def detach_value_head(self) -> None:
        """Remove the critic, if there is one."""
        self.value_head = None

    @property
    def proprio_dim(self) -> int | None:
        """Dimensions of the robot's state."""
        return self.config.state_dim

    def prepare_supervised(self, settings: FinetunePolicyConfig, lora: LoraConfig, seed: int) -> None:
        """Set up training on whole chunks, of which fewer actions may be executed later."""
        if settings.actions != "tokens":
            raise UsageError(
                f"policy.actions = {settings.actions!r}: SmolVLA is trained by flow matching; leave it out."
            )
        self.prepare_training(settings, lora, seed)
        self.num_steps = self.config.chunk_size

    def add_statistics(self, name: str, statistics: Mapping[str, Any]) -> None:
        """Normalise by these, unless the checkpoint has statistics that are known to be of this dataset."""
        supervised.add_statistics(self, {name: statistics}, lambda: statistics)

    def add_all_statistics(
        self, statistics: Mapping[str, Mapping[str, Any]], pooled: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Normalise all datasets by the pooled ones, unless the checkpoint's are known to be of them."""
        supervised.add_statistics(self, statistics, pooled)

    def use_scalings(self, scalings: Scalings) -> None:
        """Normalise by these statistics, which checkpoints are saved with."""
        self.processor.scalings = scalings
        self.files = with_statistics(self.files, self.config.raw, scalings.tensors())
        self.unread = {n: t for n, t in self.unread.items() if not n.startswith(OLD_STATISTICS)}

    def demo_rows(self, instructions: Sequence[str], proprio: FloatArray, actions: FloatArray) -> supervised.DemoRows:
        """Instructions, states and actions, normalised."""
        return supervised.demo_rows(self, instructions, proprio, actions)

    def with_noise(self, rows: TensorRows, seed: int, samples: Sequence[int]) -> supervised.DemoRows:
        """The rows with the noise and the times of flow matching."""
        return supervised.with_noise(rows, seed, samples)

    def demo_frames(self, images: Sequence[UInt8Array] | UInt8Array) -> torch.Tensor:
        """[N, I, H, W, 3] uint8, at the size that they came in."""
        if isinstance(images, np.ndarray) and images.shape[1] >= self.num_images:
            return torch.from_numpy(images[:, : self.num_images])
        return torch.from_numpy(self.processor.frames(images))

    def supervised_loss(self, rows: TensorRows, frames: torch.Tensor) -> torch.Tensor:
        """Flow matching."""
        return supervised.supervised_loss(self, rows, frames)

    def imitation_errors(self, rows: TensorRows, frames: torch.Tensor) -> ImitationErrors:
        """Of the actions that the ODE leads to, from the same noise in every batch."""
        return supervised.imitation_errors(self, rows, frames)

    @property
    def stored_conventions(self) -> StoredConventions:
        """What is said beside the weights about how they are used."""
        views = None if self.num_images == len(self.config.views) else self.num_images
        return StoredConventions(
            gripper=self.conventions.gripper,
            state_dims=self.processor.state_dims,
            num_images=views,
            statistics=self.statistics_of,
        )

    def save(self, folder: Path, dtype: torch.dtype | None = None, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write the folder as lerobot does, or the adapters if there are any; `dtype` converts the backbone's weights,
        the expert's stay float32."""
        saving.save(self, Path(folder), dtype, max_shard_bytes)

    @torch.no_grad()
    def probe_logits(self) -> torch.Tensor:
        """[2, C, M] velocities for two synthetic observations, on the host."""
        config = self.config
        generator = torch.Generator().manual_seed(0)
        side = config.tower.image
        pixels = torch.rand(2, self.num_images, 3, side, side, generator=generator)
        tokens = torch.arange(4).expand(2, -1) % config.vocab_size
        state = torch.randn(2, config.max_state_dim, generator=generator)
        noisy = torch.randn(2, config.chunk_size, config.max_action_dim, generator=generator)
        inputs = SmolVLAInputs(tokens, torch.ones_like(tokens, dtype=torch.bool), pixels, state)
        times = torch.tensor([1.0, 0.5], device=self.device)
        velocity, _ = self._field(self.prefix(inputs), noisy.to(self.device), times)
        return velocity.cpu()
