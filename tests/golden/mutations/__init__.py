"""Ways to break one convention of the published checkpoints each, and the golden comparison that must notice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comparisons as golden


@dataclass(frozen=True)
class Mutation:
    """`make` gets the original of `owner.name` and gives the wrong one."""

    breaks: str
    check: Callable[[], None]
    owner: Any
    name: str
    make: Callable[[Any], Any]
    error: type[Exception] = AssertionError


def openvla(check: Callable[..., None]) -> Callable[[], None]:
    return lambda: check(golden.load_openvla(), golden.load_arrays(golden.OPENVLA / "expected.npz"))


def oft(check: Callable[..., None]) -> Callable[[], None]:
    return lambda: check(golden.load_oft(), golden.load_arrays(golden.OFT / "expected.npz"))


def libero(check: Callable[..., None]) -> Callable[[], None]:
    return lambda: check(golden.libero_arrays())


def instead(wrong: Any) -> Callable[[Any], Any]:
    """Another function in its place."""
    return lambda original: wrong


def result(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """The same function, with its result changed."""
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs))


def method_result(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """The same method, with its result changed by what may look at the object."""
    return lambda original: lambda self, *args, **kwargs: change(self, original(self, *args, **kwargs))


def with_attribute(name: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A constructor that ends with another value for one attribute, made from the object."""

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            setattr(self, name, value(self))

        return init

    return make
