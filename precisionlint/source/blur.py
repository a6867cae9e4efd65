"""Fewer paths where there are many: differences that precision has nothing to do with are forgotten.

Two paths that agree in all that checks and regions say, and differ in a batch size or in a logger, become one whose batch size
is unknown. What is named like a part of mixed precision, and every object that is one, is kept apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from typing import Any

from precisionlint.source.evaluate import DTYPES
from precisionlint.source.garbage import Collector
from precisionlint.source.state import State, merge
from precisionlint.source.values import (
    PLAIN,
    Class,
    Cond,
    Const,
    External,
    Flow,
    Func,
    Many,
    Method,
    Obj,
    Stream,
    Sym,
    Tup,
    Value,
    flow_of,
)  # fmt: skip

KEPT = re.compile(
    r"scaler|amp\b|amp_|_amp|fp16|bf16|fp32|half\b|dtype|autocast|ctx|precision|enabled|optim|max_norm", re.I
)
"""What a name must hold for its value to be kept whether or not a test names it."""
WORD = re.compile(r"[^\W\d]\w*")

Unknown = Callable[[Any, str, Flow, list[Value | None]], Value]


def blur(states: list[State], unknown: Unknown, collector: Collector, kept: Set[str]) -> list[State]:
    """The same paths, in fewer states."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        groups.setdefault((state.checks, state.regions, state.frame), []).append(state)
    result: list[State] = []
    for group in groups.values():
        if len(group) > 1:
            blur_scopes(group, unknown, kept)
            blur_heap(group, unknown, kept)
            group = merge(group)
        alike_in_scope = same_scopes(group) if len(group) > 1 else []
        if alike_in_scope:
            for state in alike_in_scope:
                collector.collect(state)
            group = merge(group)
        if alike_in_scope and len(group) > 1:
            drop_facts(group, kept)
            group = merge(group)
        result.extend(group)
    return result


def same_scopes(group: list[State]) -> list[State]:
    """The states that another one of the group equals in all its variables: only these can become one with another."""
    return [
        state
        for index, state in enumerate(group)
        if any(other.frames == state.frames for position, other in enumerate(group) if position != index)
    ]


def blur_scopes(group: list[State], unknown: Unknown, kept: Set[str]) -> None:
    for frame in list(group[0].frames):
        scopes = [state.frames.get(frame) for state in group]
        first = scopes[0]
        if any(scope is None for scope in scopes) or all(scope is first for scope in scopes):
            continue
        names = {slot for scope in scopes for slot in scope or () if isinstance(slot, str)}
        for slot in sorted(names):
            values = [scope.get(slot) for scope in scopes if scope is not None]
            if differ(values) and all(plain(slot, value, kept) for value in values) and alike(values):
                value = unknown((frame, slot), slot, flow(values), values)
                for state in group:
                    state.scope(frame)[slot] = value


def blur_heap(group: list[State], unknown: Unknown, kept: Set[str]) -> None:
    shared = [obj for obj in group[0].heap if all(obj in state.heap for state in group)]
    for obj in shared:
        attributes = [state.heap[obj] for state in group]
        if all(one is attributes[0] for one in attributes):
            continue
        names: dict[Any, None] = {}
        for one in attributes:
            names.update(dict.fromkeys(one))
        for name in names:
            values = [one.get(name) for one in attributes]
            if differ(values) and all(plain(str(name), value, kept) for value in values) and alike(values):
                value = unknown((obj, name), str(name), flow(values), values)
                for state in group:
                    state.attributes(obj)[name] = value


def alike(values: list[Value | None]) -> bool:
    """Whether the same scale and region flowed into all that carry any."""
    return len({flow_of(value) for value in values if value is not None} - {PLAIN}) < 2


def flow(values: list[Value | None]) -> Flow:
    return next((found for value in values if value is not None and (found := flow_of(value)) != PLAIN), PLAIN)


def differ(values: list[Value | None]) -> bool:
    return any(value != values[0] for value in values)


def plain(name: str, value: Value | None, kept: Set[str]) -> bool:
    """Whether a value may be forgotten: no test around precision asks for its name, and it is nothing that precision is made of."""
    if name in kept or KEPT.search(name):
        return False
    match value:
        case None | Const() | Sym() | Cond():
            return True
        case External():
            return value.name not in DTYPES
        case Obj(cls=External(name=cls)):
            return cls in ("builtins.list", "builtins.dict") or cls.startswith("torch.nn.")
        case Obj(cls=Class(cls=definition)):
            return not KEPT.search(definition.name)
        case Tup():
            return all(plain("", item, kept) for item in value.items)
        case Func() | Stream() | Many() | Method():
            return True
    return False


def drop_facts(group: list[State], kept: Set[str]) -> None:
    """Forgets decisions that no test around precision asks for."""
    stale = {
        sym
        for state in group
        for sym in state.facts
        if not KEPT.search(sym.text) and kept.isdisjoint(WORD.findall(sym.text))
    }
    for state in group:
        for sym in stale:
            state.facts.pop(sym, None)
