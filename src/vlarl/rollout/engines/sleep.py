"""The sleep of a vLLM engine that shares its GPU with a learner.

    awake ── sleep ──► asleep ── wake_weights ──► loading ── wake_cache ──► awake
    generations        updates                    a weight sync             generations

Asleep, vLLM has given the memory of its cache and of its weights back to the GPU. A sync first brings back the memory
of the weights alone and fills it; the cache follows when they are complete, so that the new weights and the cache are
never allocated beside a copy that is no longer needed.
"""

from __future__ import annotations

from typing import Literal, Protocol

from vlarl.errors import VlarlError

KEEP_WEIGHTS = 1  # vLLM's level that moves the weights to the host's memory
DISCARD_WEIGHTS = 2  # the level that forgets them; buffers, such as those of rotary embeddings, are kept
State = Literal["awake", "asleep", "loading"]


class SleepingLLM(Protocol):
    """The part of `vllm.LLM` that puts it to sleep and wakes it."""

    def sleep(self, level: int) -> object: ...  # noqa: D102
    def wake_up(self, tags: list[str]) -> bool: ...  # noqa: D102


class Sleep:
    """Which part of an engine's memory is on its GPU."""

    def __init__(self, llm: SleepingLLM, enabled: bool) -> None:
        self._llm = llm
        self._enabled = enabled
        self.state: State = "awake"

    def fall_asleep(self, level: int) -> None:
        """Release the memory; nothing happens to an engine that is asleep already."""
        if not self._enabled:
            raise VlarlError("the engine can't sleep: it was started without vllm.sleep")
        if self.state == "asleep":
            return
        self._llm.sleep(level)
        self.state = "asleep"

    def wake_weights(self) -> None:
        """Bring the memory of the weights back, before they are loaded."""
        if self.state == "asleep":
            self._llm.wake_up(["weights"])
            self.state = "loading"

    def wake_cache(self) -> None:
        """Bring the memory of the cache back, after the weights have been loaded."""
        if self.state == "asleep":
            raise VlarlError("the cache can't be brought back before the weights")
        if self.state == "loading":
            if not self._llm.wake_up(["kv_cache"]):
                raise VlarlError("vLLM still sleeps after its weights and its cache were brought back")
            self.state = "awake"

    def check_awake(self) -> None:
        """VlarlError unless the engine is awake."""
        if self.state != "awake":
            raise VlarlError(f"the engine can't act: it is {self.state}. A weight sync wakes it.")
