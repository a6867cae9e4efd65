"""The values of the names that a program's configuration hangs on (``args.fp16``, ``cfg['amp']``) where it stands.

They are looked up in the frames of the file that asks, from inside outwards, and among its globals; attributes of
anything but ``self`` (``args.fp16``) in the program's other frames too, and those of ``self`` in the objects of the
file's classes that are alive, where all agree. Nothing of the program's runs: of an object only what lies in its
``__dict__``, its slots, its class or, of a dict, under the key is read; a property, ``__getattr__`` or a call leaves a
name undecided, and only plain values (bool, number, text, None) are told.
"""

from __future__ import annotations

import gc
import os
import sys
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping
from inspect import getattr_static
from types import FrameType, MemberDescriptorType, ModuleType
from typing import Any

from precisionlint.patterns import regex
from precisionlint.trace.places import frames, is_users

MISSING = object()
PLAIN = (bool, int, float, str, type(None))
UNDECIDED = (object, None)
"""In the place of a plain value with its type: one that is none."""
LINEAGE = type.__dict__["__mro__"].__get__
"""A class and its bases, without asking a metaclass."""
PART = regex(r"\.get\(('[^'\\]*')\)|\.?([^\W\d]\w*)|\[('[^'\\]*'|\d+)\]")
"""A step of a name: an item, an attribute, or an item under a text or a number."""


def values(names: Mapping[str, Iterable[str]], frame: FrameType | None) -> dict[str, Any]:
    """The plain values of names by the file that asks for them, those left out that have none, or one in one file and
    another in the next, or that are the end of another name with another value (``amp`` of ``self.amp``).
    """
    found: dict[str, set[tuple[type, Any]]] = {}
    for path, asked in names.items():
        owners = _instances(path) if any(name.startswith("self.") for name in asked) else []
        for name in asked:
            value = _agreed(name, _standing(name, path, frame), owners)
            if value is not MISSING:
                found.setdefault(name, set()).add(_typed(value))
    known = {name: next(iter(held)) for name, held in found.items() if len(held) == 1 and UNDECIDED not in held}
    everything = {name for asked in names.values() for name in asked}
    return {
        name: typed[1]
        for name, typed in known.items()
        if all(known.get(other) == typed for other in everything if f".{other}".endswith(f".{name}"))
    }


def _typed(value: Any) -> tuple[type, Any]:
    """A plain value with its type, so that 1, 1.0 and True are three."""
    return (type(value), value) if type(value) in PLAIN else UNDECIDED


def _standing(name: str, path: str, frame: FrameType | None) -> Any:
    """The value of a name in the innermost scope that has one."""
    its_own = PART.fullmatch(name) is not None or name.startswith("self.")
    for scope in _scopes(path, frame, its_own):
        value = _value(name, scope)
        if value is not MISSING:
            return value
    return MISSING


def _scopes(path: str, frame: FrameType | None, its_own: bool) -> Iterator[Mapping[str, Any]]:
    """The namespaces in which a name of a file is looked for, in turn; ``its_own``: only those of the file."""
    path = os.path.realpath(path)
    users = [each for each in frames(frame) if is_users(each.f_code)]
    inside = [each for each in users if os.path.realpath(each.f_code.co_filename) == path]
    for each in (*inside, *(() if its_own else users)):
        yield each.f_locals
        yield each.f_globals
    for module in _modules(path):
        yield vars(module)


def _modules(path: str) -> list[ModuleType]:
    """The modules that were loaded from a file."""
    loaded = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    return [each for each in loaded if os.path.realpath(vars(each).get("__file__") or os.devnull) == path]


def _instances(path: str) -> list[Any]:
    """The objects that are alive of the classes that a file defines."""
    own = _modules(os.path.realpath(path))
    names = {vars(each)["__name__"] for each in own}
    classes = {
        each
        for module in own
        for each in list(vars(module).values())
        if isinstance(each, type) and each.__module__ in names
    }
    known: dict[int, bool] = {}
    found = []
    for each in gc.get_objects() if classes else ():
        kind = type(each)
        if id(kind) not in known:
            known[id(kind)] = not classes.isdisjoint(LINEAGE(kind))
        if known[id(kind)]:
            found.append(each)
    return found


def _agreed(name: str, standing: Any, owners: Iterable[Any]) -> Any:
    """A value, which of ``self`` must be that of all objects that have one."""
    if not name.startswith("self."):
        return standing
    held = (standing, *(_value(name, {"self": each}) for each in owners))
    found = {_typed(value) for value in held if value is not MISSING}
    return next(iter(found))[1] if len(found) == 1 else MISSING


def _value(name: str, scope: Mapping[str, Any]) -> Any:
    first, *rest = PART.finditer(name)
    value = scope.get(first[0], MISSING)
    for part in rest:
        got, attribute, item = part.groups()
        if value is MISSING:
            return MISSING
        value = _attribute(value, attribute) if attribute else _item(value, literal_eval(got or item))
    return value


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that lies in the object or its class as it is."""
    module = isinstance(owner, ModuleType)
    found = vars(owner).get(name, MISSING) if module else getattr_static(owner, name, MISSING)
    if type(found) is MemberDescriptorType:  # a slot
        try:
            return found.__get__(owner)
        except AttributeError:
            return MISSING
    return MISSING if hasattr(type(found), "__get__") else found


def _item(owner: Any, key: str | int) -> Any:
    """What a dict, or a class made of it, holds under a key, without asking the class."""
    return dict.get(owner, key, MISSING) if isinstance(owner, dict) else MISSING
