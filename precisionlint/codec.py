"""Records as JSON's types and back, by their annotations; names of files go through a function each way.

A record becomes the list of its fields. Every field called ``path`` is the name of a file.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

Rename = Callable[[str], str]


def encode(value: Any, rename: Rename) -> Any:
    """A value as JSON's types."""
    if isinstance(value, Struct):
        return [
            rename(getattr(value, name)) if name == "path" else encode(getattr(value, name), rename)
            for name in value.__struct_fields__
        ]
    if isinstance(value, (tuple, list)):
        return [encode(each, rename) for each in value]
    return value


def decode(kind: Any, value: Any, rename: Rename) -> Any:
    """The value of a type that was encoded; raises ValueError, TypeError or KeyError where it is none."""
    return _decoder(kind)(value, rename)


@cache
def _decoder(kind: Any) -> Callable[[Any, Rename], Any]:
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _record(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _decoder(arguments[0])
        return lambda value, rename: tuple(inner(each, rename) for each in _list(value))
    if origin is tuple:
        parts = [_decoder(each) for each in arguments]
        return lambda value, rename: tuple(part(each, rename) for part, each in zip(parts, _list(value), strict=True))
    if origin in (Union, types.UnionType):
        (inner,) = (_decoder(each) for each in arguments if each is not type(None))
        return lambda value, rename: None if value is None else inner(value, rename)
    if origin is Literal:
        return lambda value, rename: _among(value, arguments)
    if kind in (str, int, bool):
        return lambda value, rename: _typed(value, kind)
    raise TypeError(f"{kind} cannot be read back")


def _record(kind: type[Struct]) -> Callable[[Any, Rename], Any]:
    hints = get_type_hints(kind)
    parts = [
        (lambda value, rename: rename(_typed(value, str))) if name == "path" else _decoder(hints[name])
        for name in kind.__struct_fields__
    ]

    def read(value: Any, rename: Rename) -> Any:
        return kind(*(part(each, rename) for part, each in zip(parts, _list(value), strict=True)))

    return read


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


def _among(value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {allowed}")
    return value


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
