"""The cases of gpu_paths.py with learners and engines; each returns what it measured, and whether that is right."""

from __future__ import annotations

import copy
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing as mp
from gpu_paths import case
from openvla_7b import make_inputs, write

from vlarl.algorithms import build_algorithm
from vlarl.config.schema import Config, VllmConfig
from vlarl.decisions import Decisions, Sampling, TrainBatch
from vlarl.policies.load import DTYPES, load_configured, load_policy
from vlarl.policies.openvla.decisions import token_decisions
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.training.fsdp import Sharding, whole
from vlarl.training.learner import Learner
from vlarl.training.ranks import ProcessGroup, Ranks, SingleRank
from vlarl.weights.sender import EngineLostError, Transport, WeightSender

BUILTIN = "builtin:tiny-openvla"
ROWS = 8
FACTOR = 4.0  # how much more than rounding is still rounding
UPDATES = 2
TEMPERATURE = 1.0
CALL_S = 240.0  # of an engine
GIB = 2**30
SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_DEBUG": "WARN"}

# Learners


@case("learners", 90, sharding="none")
@case("learners_full", 90, sharding="full")
def learners(folder: Path, device: str, sharding: Literal["none", "full"]) -> dict[str, Any]:
    """Two ranks on one device make the updates that one process makes."""
    alone = _updated(SingleRank(), Sharding(), device, microbatch_size=4)
    rounded = _updated(SingleRank(), Sharding(), device, microbatch_size=3)
    port, started = _free_port(), time.perf_counter()
    mp.spawn(_be_rank, (port, folder, sharding, device), nprocs=2)
    seconds = time.perf_counter() - started
    both = [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(2)]
    names, start = list(alone["weights"]), dict(load_policy(BUILTIN, dtype="float32").named_parameters())
    moved = _gap(alone["weights"], {name: start[name] for name in names})
    gaps = [_gap(found["weights"], alone["weights"]) for found in both]
    allowed = FACTOR * _gap(rounded["weights"], alone["weights"])
    return {
        "passed": max(gaps) <= allowed < moved / 10,
        "weights_differ_by": max(gaps),
        "allowed": allowed,
        "an_update_moves_them_by": moved,
        "grad_norms": [run["norms"] for run in (alone, *both)],
        "backend": both[0]["backend"],
        "seconds_with_start": round(seconds, 1),
    }


def _be_rank(rank: int, port: int, folder: Path, sharding: Literal["none", "full"], device: str) -> None:
    os.environ |= SOCKETS | {"NCCL_HOSTID": f"gpu-paths-{rank}"}
    torch.set_num_threads(1)
    ranks = ProcessGroup.join(rank, 2, "127.0.0.1", port, torch.device(device, 0), timedelta(seconds=60))
    result = _updated(ranks, Sharding(sharding), device, microbatch_size=4)
    result["backend"] = torch.distributed.get_backend_config()
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(result))
    ranks.any(False)
    os._exit(0)


def _updated(ranks: Ranks, sharding: Sharding, device: str, microbatch_size: int) -> dict[str, Any]:
    config = _config(microbatch_size, lr=1e-4)
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    policy = load_configured(config.policy, BUILTIN, place, deferred=sharding.mode != "none")
    policy.prepare_training(config.policy, config.lora, seed=0)
    learner = Learner(policy, build_algorithm(config.algorithm, TEMPERATURE), config, place, ranks, sharding)
    norms = [learner.update(_batch(policy, seed), seed, _ignored).metrics["grad_norm"] for seed in range(UPDATES)]
    weights = {name: whole(weight.detach()).cpu().clone() for name, weight in policy.named_parameters()}
    return {"weights": weights, "norms": norms}


def _config(microbatch_size: int, lr: float) -> Config:
    algorithm = {"epochs": 1, "old_logprobs": "engine"}
    return Config.model_validate(
        {
            "algorithm": algorithm,
            "optim": {"microbatch_size": microbatch_size, "lr": lr, "minibatches": 1},
            "policy": {"path": BUILTIN, "dtype": "float32"},
        }
    )


def _batch(policy: OpenVLAPolicy, seed: int) -> TrainBatch:
    """Made-up decisions and advantages; every process makes the same."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, policy.config.num_action_tokens)
    ids = torch.randint(0, 256, shape, generator=generator) + policy.codec.first_id
    logprobs = torch.full(shape, -math.log(256.0))
    return TrainBatch(
        inputs=_inputs(policy),
        decisions=token_decisions(ids, logprobs, policy.action_dim),
        trajectory=torch.arange(ROWS),
        old_logprobs=logprobs,
        advantages=torch.randn(shape, generator=generator),
    )


def _inputs(policy: OpenVLAPolicy, rows: int = ROWS) -> OpenVLAInputs:
    inputs = make_inputs(policy, rows, "cpu")
    if not policy.config.use_proprio:
        return inputs
    state = torch.randn(rows, policy.config.proprio_dim, generator=torch.Generator().manual_seed(1))
    return replace(inputs, proprio=state)


def _ignored(done: int, planned: int) -> None:
    del done, planned


@torch.no_grad()
def _gap(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights."""
    assert list(found) == list(expected)
    return math.sqrt(sum(float((found[n].double() - w.double().cpu()).square().sum()) for n, w in expected.items()))


# Engines in another process


class RemoteEngine:
    """An engine in a process of its own, as rank 0's sender calls all engines of a run (`weights.sender.Engines`)."""

    num_ranks = 1

    def __init__(
        self, kind: Literal["torch", "vllm"], path: str, options: dict[str, Any], dtype: str, device: str
    ) -> None:
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=_serve, args=(there, kind, path, options, dtype, device), daemon=True)
        self.process.start()
        there.close()
        self.call("version")  # or why it did not start

    @property
    def processes(self) -> Sequence[object]:
        return [self.process]

    def call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self._pipe.send_bytes(pickle.dumps((method, arguments)))
            if not self._pipe.poll(CALL_S):
                raise EngineLostError("the engine", f"has not replied to {method} for {CALL_S:.0f} s")
            failed, result = pickle.loads(self._pipe.recv_bytes())
        if failed:
            raise EngineLostError("the engine", f"failed in {method}: {result}")
        return result

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info | ({"rank_offset": 1} if "rank_offset" in init_info else {}))

    def start_sync(self, shapes: Mapping[str, tuple[int, ...]], version: int, staged: bool = False) -> None:
        self.call("start_sync", dict(shapes), version, staged)

    def update_weights(self, message: dict[str, Any]) -> None:
        self.call("update_weights", message)

    def update_weights_later(self, message: dict[str, Any]) -> None:
        self.call("update_weights", message)

    def wait_loaded(self) -> None:
        """Nothing is under way."""

    def finish_sync(self, version: int) -> None:
        self.call("finish_sync", version)

    def abandon(self, lost: str) -> None:
        del lost

    def generate(self, inputs: Any, seeds: Sequence[int]) -> Decisions:
        decisions: Decisions = self.call("generate", inputs, Sampling(TEMPERATURE), list(seeds))
        return decisions


def _serve(pipe: Any, kind: str, path: str, options: dict[str, Any], dtype: str, device: str) -> None:
    """The engine's process: one call after the other."""
    os.environ |= SOCKETS | {"NCCL_HOSTID": "gpu-paths-engine"}
    engine: Any = None
    while True:
        try:
            method, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            engine = engine or _engine(kind, path, options, dtype, device)
            found = getattr(engine, method)
            reply = (False, found(*arguments) if callable(found) else found)
        except Exception as error:  # noqa: BLE001 - a process boundary: the caller raises it
            sys.excepthook(*sys.exc_info())
            reply = (True, f"{type(error).__name__}: {error}")
        pipe.send_bytes(pickle.dumps(reply))


def _engine(kind: str, path: str, options: dict[str, Any], dtype: str, device: str) -> Any:
    if kind == "torch":
        from vlarl.rollout.engines.replica import ReplicaEngine

        return ReplicaEngine(load_policy(path, dtype=dtype, device=device), torch.device(device))
    from vlarl.rollout.engines.vllm import VllmEngine

    return VllmEngine(load_policy(path, device="meta"), VllmConfig.model_validate(options), DTYPES[dtype])


TINY = {"enforce_eager": True, "max_num_seqs": 32, "gpu_memory_utilization": 0.2}


@case("sync_torch", 90, kind="torch", backend="object_store")
@case("sync_object_store", 150, kind="vllm", backend="object_store")
@case("sync_nccl", 150, kind="vllm", backend="nccl")
@case("sync_ipc", 150, kind="vllm", backend="ipc")
def sync(folder: Path, device: str, kind: Literal["torch", "vllm"], backend: Any) -> dict[str, Any]:
    """Three syncs with a real update before each; after each, the engine's log-probs are the learner's."""
    os.environ |= SOCKETS | {"NCCL_HOSTID": "gpu-paths-learner"}
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = _config(ROWS, lr=1e-4)
    policy = load_policy(BUILTIN, dtype="float32", device=device)
    policy.prepare_training(config.policy, config.lora, seed=0)
    learner = Learner(policy, build_algorithm(config.algorithm, TEMPERATURE), config, torch.device(device))
    options = TINY | {"sync_backend": backend}
    engine = RemoteEngine(kind, BUILTIN, options, dtype, device)
    sender = WeightSender(policy, SingleRank(), _transport(backend, DTYPES[dtype]))
    inputs, rows, passed = _inputs(policy), [], True
    unsynced = copy.deepcopy(policy)
    rows.append(_compared(policy, engine.generate(inputs, range(ROWS)), dtype))
    for version in range(1, 4):
        learner.update(_batch(policy, version), version, _ignored)
        started = time.perf_counter()
        lost = sender.send(engine, version)
        seconds = time.perf_counter() - started
        after = engine.generate(inputs, range(ROWS))
        old, new = (_logprobs(each, inputs, after) for each in (unsynced, policy))
        row = _compared(policy, after, dtype) | {"unsynced_differ_by": _rms(old - new), "sync_s": round(seconds, 3)}
        rows.append(row | {"versions": after.version.unique().tolist(), "mb": sender.num_bytes / 1e6})
        passed &= lost is None and rows[-1]["versions"] == [version]
    passed &= all(row["differs_by"] <= row["allowed"] for row in rows)
    passed &= rows[-1]["unsynced_differ_by"] > rows[-1]["allowed"]  # weights that don't arrive would be noticed
    return {"passed": passed, "dtype": dtype, "syncs": rows}


def _transport(backend: Any, dtype: torch.dtype) -> Transport:
    return Transport(backend, dtype, 1 << 28, True, lambda: ("127.0.0.1", _free_port()), CALL_S)


@torch.no_grad()
def _logprobs(policy: OpenVLAPolicy, inputs: Any, decisions: Decisions) -> torch.Tensor:
    device = next(policy.parameters()).device
    return policy.evaluate(inputs.to(device), decisions.to(device), TEMPERATURE).logprobs.cpu()


def _compared(policy: OpenVLAPolicy, decisions: Decisions, dtype: str, inputs: Any = None) -> dict[str, float]:
    """The engine's log-probs against the learner's in a wider type, beside the learner's own error in the engine's."""
    inputs = inputs if inputs is not None else _inputs(policy)
    with _in_dtype(policy, torch.float64 if dtype == "float32" else torch.float32):
        exact = _logprobs(policy, inputs, decisions)
    with _in_dtype(policy, DTYPES[dtype]):
        plain = _logprobs(policy, inputs, decisions)
    found = decisions.engine_logprobs
    own, floor = _rms(plain - exact), 16 * torch.finfo(torch.float32).eps
    return {
        "differs_by": _rms(found - exact),
        "allowed": FACTOR * own + floor,
        "worst": float((found - exact).abs().max()),
    }


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@contextmanager
def _in_dtype(policy: OpenVLAPolicy, dtype: torch.dtype) -> Iterator[None]:
    """The policy's weights in another type inside the block."""
    kept = {name: weight.data for name, weight in policy.named_parameters()}
    for weight in policy.parameters():
        weight.data = weight.data.to(dtype)
    yield
    for name, weight in policy.named_parameters():
        weight.data = kept[name]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# OpenVLA-7B's shape

LARGE = {"max_num_seqs": 64, "max_model_len": 512, "gpu_memory_utilization": 0.45, "sleep": True, "sync_backend": "ipc"}


@case("vllm_7b_eager", 300, enforce_eager=True)
@case("vllm_7b_graphs", 400, enforce_eager=False)
@case("vllm_7b_own_class", 300, enforce_eager=True, model_class="vllm", sleep=False)
def vllm_7b(folder: Path, device: str, **options: Any) -> dict[str, Any]:
    """vLLM at 7B's shape in bfloat16: log-probs, speed, sleep, and weights by ipc that wake it."""
    checkpoint = folder / "7b"
    written = write(checkpoint)
    torch.cuda.empty_cache()
    started = time.perf_counter()
    engine = RemoteEngine("vllm", str(checkpoint), LARGE | options, "bfloat16", device)
    found: dict[str, Any] = {"written": written, "start_s": round(time.perf_counter() - started, 1)}
    policy = load_policy(checkpoint, dtype="bfloat16", device=device).eval()
    found["first"] = first = _large_rows(policy, engine)
    passed = first["differs_by"] <= first["allowed"]
    if (LARGE | options)["sleep"]:
        found |= _slept(policy, engine)
        passed &= found["freed_gib"] > 30 and found["freed_gib_discarding"] > 30
        passed &= all(found[name]["differs_by"] <= found[name]["allowed"] for name in ("woken", "woken_again"))
        passed &= found["moved_by"] > found["woken"]["allowed"]
    return {"passed": bool(passed)} | found


def _large_rows(policy: OpenVLAPolicy, engine: RemoteEngine) -> dict[str, Any]:
    """The second of two generations of 64 rows counts: the first may record graphs."""
    inputs = make_inputs(policy, 64, "cpu")
    for _ in range(2):
        started = time.perf_counter()
        decisions = engine.generate(inputs, range(64))
        seconds = time.perf_counter() - started
    few = decisions.rows(slice(0, ROWS))
    return _compared(policy, few, "bfloat16", inputs.rows(slice(0, ROWS))) | {"per_s": round(64 / seconds, 1)}


def _slept(policy: OpenVLAPolicy, engine: RemoteEngine) -> dict[str, Any]:
    """Asleep while the learner's weights change; a sync wakes it. The second sleep forgets the weights."""
    sender, found = WeightSender(policy, SingleRank(), _transport("ipc", torch.bfloat16)), {}
    for version, (freed, woken) in enumerate((("freed_gib", "woken"), ("freed_gib_discarding", "woken_again")), 1):
        before = _free_gib()
        engine.call("sleep")
        found[freed] = round(_free_gib() - before, 2)
        moved = _changed(policy, version)
        started = time.perf_counter()
        lost = sender.send(engine, version)
        assert lost is None, lost
        found[f"sync_{version}_s"] = round(time.perf_counter() - started, 2)
        found[woken] = _large_rows(policy, engine)
        found["moved_by"] = min(found.get("moved_by", math.inf), moved)
    return found | {"sync_gb": sender.num_bytes / 1e9}


def _free_gib() -> float:
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info()[0]) / GIB


@torch.no_grad()
def _changed(policy: OpenVLAPolicy, seed: int) -> float:
    """Change the weights of the last layers; returns the root mean square by which log-probs have moved."""
    inputs = make_inputs(policy, ROWS, "cpu")
    decisions = _batch(policy, seed).decisions
    before = _logprobs(policy, inputs, decisions)
    generator = torch.Generator("cuda").manual_seed(seed)
    for weight in list(policy.model.language_model.model.layers[-4:].parameters()):
        if weight.ndim == 2:
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator, device="cuda"))
    return _rms(_logprobs(policy, inputs, decisions) - before)
