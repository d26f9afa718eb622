"""vLLM engines in a process of their own, as they are meant to be used; one process for all tests, since imports take
most of the time."""

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from fakes.float_error import check_logprobs

from vlarl.config.schema import LoraConfig, ModelConfig, VllmConfig
from vlarl.decisions import Sampling
from vlarl.policies.load import DTYPES, load_policy

BUILTIN = "builtin:tiny-openvla"
FLOAT32 = {"enforce_eager": True, "max_num_seqs": 32}
DEADLINE_S = 300.0


def assert_agrees(engine, policy, inputs, temperature, seeds):
    """The engine's log-probs are those of the learner's policy, as nearly as float32 allows on these inputs."""
    tokens = engine.generate(inputs, Sampling(temperature), seeds)
    check_logprobs(tokens.engine_logprobs, policy, inputs, tokens.sample.ids, temperature)
    return tokens


class EngineProcess:
    """Starts engines by name and calls their methods; an error in their process is raised here."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()

    def start(
        self, name: str, path: str, options: dict[str, Any], lora: dict[str, Any] | None = None, dtype: str = "float32"
    ) -> "RemoteEngine":
        """An engine of the policy at the path, with new adapters as given."""
        self.call(name, "start", path, options, lora or {}, dtype)
        return RemoteEngine(self, name)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        self._here.send_bytes(pickle.dumps((name, method, arguments)))  # plain bytes: no shared memory of torch's
        if not self._here.poll(DEADLINE_S):
            raise TimeoutError(f"the engine process has not replied to {method} for {DEADLINE_S:.0f} s")
        failed, result = pickle.loads(self._here.recv_bytes())
        if failed:
            raise result
        return result

    def stop(self) -> None:
        self._here.close()
        self._process.kill()  # vLLM is slow to exit
        self._process.join()


class RemoteEngine:
    """One engine of the process, with the methods of `VllmEngine`."""

    def __init__(self, process: EngineProcess, name: str) -> None:
        self.process = process
        self.name = name

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self.process.call(self.name, method, *arguments)

    @property
    def version(self) -> int:
        return int(self.process.call(self.name, "version"))


def forget(model: torch.nn.Module) -> int:
    """Replace the values of all weights, as a GPU does whose memory is released; returns how many weights there are.

    On a CPU vLLM computes with packed copies of some matrices, which are left alone.
    """
    with torch.no_grad():
        return len([p.fill_(0.5) for p in model.parameters() if p.numel()])


def _serve(connection: Connection) -> None:
    """The engines' process: one call after the other, until the other side closes the pipe."""
    from vlarl.rollout.engines.vllm import VllmEngine

    torch.set_num_threads(1)
    engines: dict[str, VllmEngine] = {}

    def handle(name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "start":
            path, options, lora, dtype = arguments
            policy = load_policy(path, device="meta")
            policy.adapt(ModelConfig(), LoraConfig(**lora), seed=0)
            engines[name] = VllmEngine(policy, VllmConfig(**options), DTYPES[dtype])
            return None
        if method == "tamper_with_version":
            engines[name]._llm.update_weight_version(arguments[0])
            return None
        if method == "forget":
            return engines[name]._llm.apply_model(forget)
        found = getattr(engines[name], method)
        return found(*arguments) if callable(found) else found

    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            result = (False, handle(*call))
        except Exception as error:  # a process boundary: the test raises it
            result = (True, error)
        connection.send_bytes(pickle.dumps(result))
