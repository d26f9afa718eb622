"""Finds and imports a reward that is named as `module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Literal

from vlarl.config.problems import nearest
from vlarl.errors import UsageError, describe_error, raised_in

LISTED = 10  # functions that a message lists

FunctionStyle = Literal["trajectory", "trl", "verl"]
"""How a reward function is called: with an episode, as TRL calls it, or as verl does."""


def import_function(source: str) -> Callable[..., float]:
    """The function that `module:function` names; the error says which of the two is wrong."""
    module_name, _, name = source.partition(":")
    _look_here()
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything
        raise _cannot_import(source, error) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"reward.source: {module_name!r} has no function {name!r}; {_there(module, name)}.")
    refuse_arguments(f"reward.source: {source}", function)
    return function  # type: ignore[no-any-return]


def style_of(function: Callable[..., object]) -> FunctionStyle:
    """How a reward function wants to be called, by the names of its parameters."""
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some compiled functions have none
        return "trajectory"
    if "completions" in names:
        return "trl"
    return "verl" if {"solution_str", "ground_truth"} <= names else "trajectory"


def refuse_arguments(subject: str, function: Callable[..., object]) -> None:
    """Refuse a reward that can't be called with one argument, if its signature is known; those that score texts are
    called by the names of their parameters."""
    if style_of(function) != "trajectory":
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some compiled functions have none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        remedy = "give it one parameter, and defaults for any others"
        called = "is called with one argument, the trajectory (or, for texts, with prompts and completions as in TRL)"
        raise UsageError(f"{subject} takes {signature}, but {called}; {remedy}.") from error


def refuse_missing_module(source: str) -> None:
    """Refuse a module that does not exist, with the message of an import, without running any of its code.

    Of a module in a package only the package is searched: the package itself may set where its modules are.
    """
    name = source.partition(":")[0].partition(".")[0]
    if not name or sys.modules.get(name) is not None:  # a relative name, which fails on import; or e.g. __main__
        return
    _look_here()
    if importlib.util.find_spec(name) is None:
        raise _cannot_import(source, ModuleNotFoundError(f"No module named {name!r}", name=name))


def _look_here() -> None:
    """Put the working directory on sys.path, which the `vlarl` program starts without."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _cannot_import(source: str, error: BaseException) -> UsageError:
    module = source.partition(":")[0]
    return UsageError(f"reward.source: cannot import the module {module!r} of {source!r}: {_why(error, module)}")


def _there(module: ModuleType, name: str) -> str:
    """The functions that a module defines, for the message about one that it does not define."""
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    own = [key for key in own if getattr(getattr(module, key), "__module__", None) == module.__name__]
    if not own:
        return "it defines none; write `def NAME(trajectory): ...` in it"
    match = nearest(name, own)
    return (f"did you mean {module.__name__}:{match}? " if match else "") + f"It has {', '.join(own[:LISTED])}"


def _why(error: BaseException, module: str) -> str:
    """Why a module could not be imported, and the remedy."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"{error}. Run from the folder that holds it, or put that folder on PYTHONPATH."
    if isinstance(error, ModuleNotFoundError):
        return f"it needs the package {error.name!r}, which is not installed in this environment; install it."
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or module).name}, line {error.lineno}"
        return f"{type(error).__name__} in {place}: {error.msg}; correct it."
    frames = [frame for frame in raised_in(error) if "importlib" not in frame.filename]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    if isinstance(error, SystemExit):
        return f'it {describe_error(error)}{place}; put what is a program under `if __name__ == "__main__":`.'
    return f"it {describe_error(error)}{place}; correct it, or move what fails into the function."
