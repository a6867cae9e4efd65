"""The values of the names that a program's configuration hangs on (``args.fp16``, ``use_amp``) where it stands.

They are looked up in the user's frames from inside outwards. Nothing of the program's runs: a property or a call leaves
a name undecided, and only plain values (bool, number, text, None) are told.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getattr_static
from types import FrameType, ModuleType
from typing import Any

from precisionlint.trace.places import frames, is_users

MISSING = object()
PLAIN = (bool, int, float, str, type(None))


def values(names: Iterable[str], frame: FrameType | None) -> dict[str, Any]:
    """The plain values of dotted names, those that are none left out."""
    found = {}
    for name in names:
        first, *rest = name.split(".")
        value = _variable(first, frame)
        for part in rest:
            value = MISSING if value is MISSING else _attribute(value, part)
        if type(value) in PLAIN:
            found[name] = value
    return found


def _variable(name: str, frame: FrameType | None) -> Any:
    for each in frames(frame):
        if is_users(each.f_code):
            for scope in (each.f_locals, each.f_globals):
                if name in scope:
                    return scope[name]
    return MISSING


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that lies in the object or its class as it is."""
    module = isinstance(owner, ModuleType)
    found = vars(owner).get(name, MISSING) if module else getattr_static(owner, name, MISSING)
    return MISSING if hasattr(type(found), "__get__") else found
