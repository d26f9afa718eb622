"""`vllm.LLM` without a model: it remembers the order of calls, and what of its memory is on the GPU."""

from typing import Any

from vlarl.weights.buckets import bucket_names


class FakeLLM:
    """Weights are known by name only. `garbage` are those whose values were discarded and not loaded since."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.garbage = names, set[str]()
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.version = "none"
        self.llm_engine = self

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            self.garbage = set(self.names)

    def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        assert self.asleep.issuperset(tags), "vLLM ignores tags that are awake"
        self.asleep -= set(tags)
        return not self.asleep

    def start_weight_update(self) -> None:
        self._load("start")

    def update_weights(self, given: dict[str, Any]) -> None:
        self._load("load")
        self.garbage -= bucket_names(given["update_info"]["payload"])

    def finish_weight_update(self, weight_version: str = "none") -> None:
        self._load("finish")
        self.version = weight_version

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        assert method == "load_adapters"
        self._load("load adapters")
        self.garbage -= bucket_names(args[0])

    def _load(self, call: str) -> None:
        assert "weights" not in self.asleep, "there is no memory to load weights into"
        if not self.calls or self.calls[-1] != call:
            self.calls.append(call)

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def get_weight_version(self) -> str:
        return self.version

    def reset_encoder_cache(self) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return not self.asleep
