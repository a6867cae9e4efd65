"""The values of the names that a program's configuration hangs on (``args.fp16``, ``use_amp``) where it stands.

They are looked up in the frames of the file that asks, from inside outwards, and among its globals; attributes of
anything but ``self`` (``args.fp16``) in the program's other frames too. Nothing of the program's runs: a property or a
call leaves a name undecided, and only plain values (bool, number, text, None) are told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from inspect import getattr_static
from types import FrameType, ModuleType
from typing import Any

from precisionlint.trace.places import frames, is_users

MISSING = object()
PLAIN = (bool, int, float, str, type(None))


def values(names: Mapping[str, Iterable[str]], frame: FrameType | None) -> dict[str, Any]:
    """The plain values of dotted names by the file that asks for them, those left out that have none, or one in one
    file and another in the next.
    """
    found: dict[str, set[tuple[type, Any]]] = {}
    for path, asked in names.items():
        for name in asked:
            for scope in _scopes(path, frame, "." not in name or name.startswith("self.")):
                value = _value(name, scope)
                if value is not MISSING:
                    if type(value) in PLAIN:
                        found.setdefault(name, set()).add((type(value), value))
                    break
    return {name: next(iter(held))[1] for name, held in found.items() if len(held) == 1}


def _scopes(path: str, frame: FrameType | None, its_own: bool) -> Iterator[Mapping[str, Any]]:
    """The namespaces in which a name of a file is looked for, in turn; ``its_own``: only those of the file."""
    path = os.path.realpath(path)
    users = [each for each in frames(frame) if is_users(each.f_code)]
    inside = [each for each in users if os.path.realpath(each.f_code.co_filename) == path]
    for each in (*inside, *(() if its_own else users)):
        yield each.f_locals
        yield each.f_globals
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and os.path.realpath(vars(module).get("__file__") or os.devnull) == path:
            yield vars(module)


def _value(name: str, scope: Mapping[str, Any]) -> Any:
    first, *rest = name.split(".")
    value = scope.get(first, MISSING)
    for part in rest:
        value = MISSING if value is MISSING else _attribute(value, part)
    return value


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that lies in the object or its class as it is."""
    module = isinstance(owner, ModuleType)
    found = vars(owner).get(name, MISSING) if module else getattr_static(owner, name, MISSING)
    return MISSING if hasattr(type(found), "__get__") else found
