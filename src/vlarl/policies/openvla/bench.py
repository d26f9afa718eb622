"""OpenVLA as `vlarl bench` measures it: inputs of random pixels and ids, counts of work, and the peer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from vlarl.decisions import Decisions, TensorRows
from vlarl.policies.bench_model import Work
from vlarl.policies.family import DtypeName
from vlarl.policies.openvla.decisions import token_decisions, token_ids
from vlarl.policies.openvla.decoders import embed_prefix
from vlarl.policies.openvla.inputs import OpenVLAInputs, openvla_inputs
from vlarl.policies.openvla.memory import PROMPT_LENGTH
from vlarl.policies.openvla.peer import TransformersPeer
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.work import OpenVLAWork
from vlarl.types import Observation

FIRST_ID = 10  # ids below are those of special tokens
INSTRUCTION = "pick up the red block and put it on the blue plate in the middle of the table"


class OpenVLABench:
    """One policy, with its adapters or without."""

    def __init__(self, policy: OpenVLAPolicy) -> None:
        self.policy = policy
        config = policy.config
        if policy.normalizer.unnorm_key is None and config.norm_stats:  # the values of actions don't matter here
            policy.normalizer.unnorm_key = next(iter(config.norm_stats))
        dtype: DtypeName = "float32" if policy.model.dtype == torch.float32 else "bfloat16"
        self._work = OpenVLAWork(config, dtype)
        parallel = config.decoder == "parallel"
        self.decision = f"chunk of {config.chunk_length}" if parallel else f"{config.num_action_tokens}-token action"

    def inputs(self, rows: int, seed: int) -> TensorRows:
        """Prompts of 32 random ids, images of random pixels."""
        config, generator = self.policy.config, torch.Generator().manual_seed(seed)
        ids = torch.randint(FIRST_ID, config.first_action_id, (rows, PROMPT_LENGTH), generator=generator)
        ids[:, 0] = FIRST_ID if config.bos_id is None else config.bos_id
        shape = (rows, config.num_images, 3, config.image_size, config.image_size)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        proprio = torch.rand(rows, config.proprio_dim, generator=generator) * 2 - 1 if config.use_proprio else None
        return OpenVLAInputs(ids, torch.ones_like(ids, dtype=torch.bool), pixels, proprio)

    def decisions(self, rows: int, seed: int) -> Decisions:
        """Random action tokens, with the log-prob of a uniform distribution."""
        config, generator = self.policy.config, torch.Generator().manual_seed(seed)
        shape = (rows, config.num_action_tokens)
        ids = torch.randint(0, config.num_action_bins, shape, generator=generator) + config.first_action_id
        logprobs = torch.full(shape, -float(np.log(config.num_action_bins)))
        return token_decisions(ids, logprobs, self.policy.action_dim)

    def observation(self, seed: int) -> Observation:
        """Random pixels with an instruction of so many words that the prompt has 32 tokens, or more with its last."""
        config, random = self.policy.config, np.random.default_rng(seed)
        size = self.policy.image_size
        images = random.integers(0, 256, (config.num_images, size, size, 3), dtype=np.uint8)
        proprio = random.uniform(-1, 1, config.proprio_dim).astype(np.float32)
        words = INSTRUCTION.split()
        following = itertools.cycle(INSTRUCTION.split())
        while self._prompt_length(words) < PROMPT_LENGTH:
            words.append(next(following))
        return Observation(images, proprio, " ".join(words))

    def tokens(self, decisions: Decisions) -> torch.Tensor:
        """[B, K*D] the ids that were sampled."""
        return token_ids(decisions)

    @torch.no_grad()
    def prefill(self, inputs: TensorRows) -> torch.Tensor:
        """[B, H] the state before the first action token."""
        policy = self.policy
        prefix = embed_prefix(policy.model, openvla_inputs(inputs).to(policy.device), policy.proprio_projector)
        return policy.decoder.first_state(policy.model, prefix)

    def generation_work(self, rows: int, rank: int | None) -> Sequence[Work]:
        """The passes that sample decisions."""
        return self._work.generation(rows, rank)

    def prefill_work(self, rows: int, rank: int | None) -> Sequence[Work] | None:
        """The pass over images and prompt; None for the parallel decoder, whose chunk is one pass."""
        return None if self.policy.config.decoder == "parallel" else self._work.prefill(rows, rank)

    def update_work(self, rows: int, rank: int | None, recompute: bool) -> Sequence[Work]:
        """Forward and backward of one microbatch."""
        return self._work.update(rows, rank, recompute)

    def peer(self) -> TransformersPeer:
        """The same weights in transformers."""
        return TransformersPeer(self.policy)

    def _prompt_length(self, words: Sequence[str]) -> int:
        blank = np.zeros((self.policy.config.num_images, self.policy.image_size, self.policy.image_size, 3), np.uint8)
        proprio = np.zeros(self.policy.config.proprio_dim, np.float32)
        seen = self.policy.process([Observation(blank, proprio, " ".join(words))])
        return openvla_inputs(seen).input_ids.shape[1]
