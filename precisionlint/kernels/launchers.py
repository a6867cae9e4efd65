"""A user's launchers: how a contract is put beside one, and how those of a module or file are found and loaded.

It knows neither triton nor what the contracts say. The contract of a launcher is an attribute of the function.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from msgspec import Struct

F = TypeVar("F", bound=Callable[..., Any])

ATTRIBUTE = "__precisionlint_contracts__"

FORM = "a launcher is a Python function of tensors that allocates the outputs, launches the kernel and returns them"


class LauncherError(Exception):
    """A launcher cannot be used; the text is one line that says why."""


class Declared(Struct, frozen=True):
    """A contract's name and options as `precisionlint.contract` was given them."""

    contract: str
    options: Mapping[str, str]


def declare(contract: str, options: Mapping[str, object]) -> Callable[[F], F]:
    """A decorator that puts a contract beside a launcher, which stays as it is; several add up."""
    words = {
        name.replace("_", "-"): repr(value) if isinstance(value, float) else str(value)
        for name, value in options.items()
    }

    def decorate(launch: F) -> F:
        setattr(launch, ATTRIBUTE, (*declared(launch), Declared(contract, words)))
        return launch

    return decorate


def declared(launch: object) -> tuple[Declared, ...]:
    """The contracts that a function was decorated with."""
    found: tuple[Declared, ...] = getattr(launch, ATTRIBUTE, ())
    return found


def find(spec: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The launchers that MODULE:LAUNCHER, FILE.py:LAUNCHER, MODULE or FILE.py names, each with such a name of its own.

    Without a LAUNCHER they are the functions that declare a contract. Raises LauncherError.
    """
    _, colon, name = spec.rpartition(":")
    if colon:
        yield spec, load(spec)
        return
    module = _module(name, spec)
    functions = [(key, value) for key, value in vars(module).items() if declared(value)]
    if not functions:
        raise LauncherError(
            f"{spec} holds no launcher that declares a contract: name one, as in {spec}:launch --contract NAME, or put "
            "@precisionlint.contract(NAME) on it"
        )
    yield from ((f"{spec}:{key}", value) for key, value in functions)


def load(spec: str) -> Callable[..., Any]:
    """The function that MODULE:LAUNCHER or FILE.py:LAUNCHER names; raises LauncherError."""
    place, _, name = spec.rpartition(":")
    found: Any = _module(place, spec)
    for part in name.split("."):
        if not hasattr(found, part):
            raise LauncherError(f"cannot load {spec}: {place} has no '{name}'")
        found = getattr(found, part)
    _check_function(spec, found)
    function: Callable[..., Any] = found
    return function


def _check_function(spec: str, found: object) -> None:
    if not callable(found) or hasattr(found, "arg_names"):
        kind = "a Triton kernel" if hasattr(found, "arg_names") else "no function"
        raise LauncherError(f"{spec} is {kind}; {FORM}")


def check_form(name: str, launch: Callable[..., Any], inputs: tuple[Any, ...], form: str, example: str) -> None:
    """Raises LauncherError, with the form and an example, where a launcher cannot be called with such inputs at all."""
    _check_function(name, launch)
    try:
        signature = inspect.signature(launch, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin: calling it will tell
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        body = "; ".join(line.strip() for line in example.splitlines()[1:])
        raise LauncherError(
            f"{name}{signature} cannot be called with {len(inputs)} tensors: {error}. Its contract asks for {form}. "
            f"For example: {example.splitlines()[0]} {body}"
        ) from error


def spec_of(launch: Callable[..., Any]) -> str:
    """MODULE:LAUNCHER of a function, or FILE.py:LAUNCHER where its module cannot be imported by name.

    Raises LauncherError for a function that has no name in its module.
    """
    while isinstance(launch, partial):
        launch = launch.func
    module, name = getattr(launch, "__module__", ""), getattr(launch, "__qualname__", "<")
    if "<" in name or sys.modules.get(module) is None:
        raise LauncherError(f"{name} is no function of a module: another process could not find it")
    path = inspect.getsourcefile(launch)
    try:
        known = importlib.util.find_spec(module) if module != "__main__" else None
    except (ImportError, ValueError):
        known = None
    if known is not None and known.origin and path and Path(known.origin).resolve() == Path(path).resolve():
        return f"{module}:{name}"
    return f"{path}:{name}"


def _module(place: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:  # whatever a user's module raises when it is imported, sys.exit among it
        text = str(error).partition("\n")[0]
        raise LauncherError(f"cannot load {spec}: {type(error).__name__}: {text}") from error


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
