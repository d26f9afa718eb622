"""Callables that are given in Python in place of a name. They travel with the configuration, but not into its YAML.

    {"reward.source": f} ──► reward.source = "python:my_module.f" ──► config.yaml, report
                         └─► reward.given["python:my_module.f"] ──► the reward; other processes, by cloudpickle

The name in config.yaml stands for the callable. Nothing is imported by it: a run is resumed with the callable itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vlarl.errors import UsageError

PREFIX = "python:"


class GivenCallable:
    """A callable of the user's, which can be sent to other processes even if a script or a notebook defines it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def name(self) -> str:
        """Its name in a configuration: `python:my_module.f`."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        known = function if hasattr(function, "__qualname__") else type(function)
        parts = [part for part in f"{known.__module__}.{known.__qualname__}".split(".") if part != "<locals>"]
        outer = [part for part in parts[:-1] if part != "<lambda>"]  # of nested lambdas only the inner one is named
        return PREFIX + ".".join([*outer, parts[-1]])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's callable."""
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenCallable) and self.function == other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Callable[[bytes], GivenCallable], tuple[bytes]]:
        import cloudpickle  # pickle itself sends neither lambdas nor what a script or a notebook defines

        return _unpickled, (cloudpickle.dumps(self.function),)


def _unpickled(content: bytes) -> GivenCallable:
    import cloudpickle

    return GivenCallable(cloudpickle.loads(content))


def named(value: object, given: dict[str, GivenCallable]) -> object:
    """The value with a name in place of every callable; each callable is added to `given` under its name."""
    if isinstance(value, list | tuple):
        return tuple(named(item, given) for item in value)
    if not callable(value):
        return value
    found = GivenCallable(value)
    names = (found.name, *(f"{found.name}_{index}" for index in range(2, len(given) + 3)))
    name = next(name for name in names if given.get(name, found) == found)
    given[name] = found
    return name


def is_given(name: str) -> bool:
    """Whether a name of a configuration stands for a callable that was given in Python."""
    return name.startswith(PREFIX)


def find_given(option: str, name: str, given: dict[str, GivenCallable], argument: str) -> GivenCallable:
    """The callable with this name; UsageError if the configuration was read from a file."""
    if name not in given:
        evaluate = " or vlarl.evaluate(CHECKPOINT, env=...)" if argument == "env" else ""
        raise UsageError(
            f"{option} = {name!r} was given as a callable in Python, which config.yaml cannot hold: give it again in "
            f"Python, by vlarl.train(resume=RUN, {argument}=...){evaluate}; or set {option} to module:function."
        )
    return given[name]


def refuse_unsendable(argument: str, function: Callable[..., Any]) -> None:
    """Refuse a callable that can't be sent to other processes, before any of them is started."""
    import pickle

    try:
        pickle.dumps(GivenCallable(function))
    except Exception as error:  # pickling a user's object may raise anything
        raise UsageError(
            f"{argument}: {GivenCallable(function).name.removeprefix(PREFIX)} cannot be sent to the processes that run "
            f"environments ({type(error).__name__}: {error}). Create what it uses inside the function, or define the "
            "function in a module, which each process then imports itself."
        ) from error
