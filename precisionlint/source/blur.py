"""Fewer paths where there are many: differences that precision has nothing to do with are forgotten.

Two paths that agree in all that checks and regions say, and differ in a batch size or in a logger, become one whose batch size
is unknown. What is named like a part of mixed precision, and every object that is one, is kept apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from functools import lru_cache
from typing import Any

from precisionlint.patterns import regex
from precisionlint.source.differing import differing
from precisionlint.source.garbage import Collector
from precisionlint.source.objects import DTYPES, is_container
from precisionlint.source.parsing import words_in
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

KEPT = regex(
    r"scaler|amp\b|amp_|_amp|fp16|bf16|fp32|half\b|dtype|autocast|ctx|precision|enabled|optim|max_norm|lora|peft|freez|frozen",
    re.I,
)
"""What a name must hold for its value to be kept whether or not a test names it."""


SCHEDULERS = "lr_scheduler"
"""The module of torch.optim that holds no optimizers."""


@lru_cache(maxsize=20_000)
def is_kept(name: str) -> bool:
    """Whether a name alone says that its value is kept."""
    return KEPT.search(name) is not None


def is_asked(text: str, kept: Set[str]) -> bool:
    """Whether a test around precision asks for a value that goes by these words."""
    return is_kept(text) or not kept.isdisjoint(words_of(text))


@lru_cache(maxsize=20_000)
def words_of(text: str) -> frozenset[str]:
    """The words of what a value goes by: the same few are asked for at each fork."""
    return words_in(text)


Unknown = Callable[[Any, str, Flow, list[Value | None]], Value]


def blur(states: list[State], unknown: Unknown, collector: Collector, kept: Set[str]) -> list[State]:
    """The same paths, in fewer states."""
    groups: dict[Any, list[State]] = {}
    for state in states:
        groups.setdefault((state.verdict, state.regions, state.frame), []).append(state)
    result: list[State] = []
    for group in groups.values():
        if len(group) > 1:
            blur_scopes(group, unknown, kept)
            blur_heap(group, unknown, kept)
            group = merge(group)
        alike_in_scope = same_scopes(group) if len(group) > 1 else []
        if alike_in_scope:
            collector.collect(alike_in_scope)
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
    for frame in differing([state.frames for state in group]):
        if not all(frame in state.frames for state in group):
            continue
        scopes = [state.frames[frame] for state in group]
        for slot in sorted(slot for slot in differing(scopes) if isinstance(slot, str)):
            values = [scope.get(slot) for scope in scopes]
            if differ(values) and all(plain(slot, value, kept) for value in values):
                flows = [flow_in(state, value) for state, value in zip(group, values, strict=True)]
                if not alike(values, flows):
                    continue
                value = unknown((frame, slot), slot, flow(flows), values)
                for state in group:
                    state.scope(frame)[slot] = value


def blur_heap(group: list[State], unknown: Unknown, kept: Set[str]) -> None:
    for obj in differing([state.heap for state in group]):
        if not all(obj in state.heap for state in group):
            continue
        attributes = [state.heap[obj] for state in group]
        for name in differing(attributes):
            values = [one.get(name) for one in attributes]
            if name == "*" and is_container(obj):  # so many, or none: none are so many
                some = {value for value in values if value is not None}
                if len(some) == 1 and None in values:
                    for state in group:
                        state.attributes(obj)[name] = next(iter(some))
                    continue
            if differ(values) and all(plain(str(name), value, kept) for value in values):
                flows = [flow_in(state, value) for state, value in zip(group, values, strict=True)]
                if not alike(values, flows):
                    continue
                value = unknown((obj, name), str(name), flow(flows), values)
                for state in group:
                    state.attributes(obj)[name] = value


def flow_in(state: State, value: Value | None) -> Flow:
    """The scale and region that flowed into a value; into the items of a list."""
    if value is not None and is_container(value):
        return flow([flow_of(item) for item in state.heap.get(value, {}).values()])
    return PLAIN if value is None else flow_of(value)


def alike(values: list[Value | None], flows: list[Flow]) -> bool:
    """Whether the same scale and region flowed into all of them; a constant, or none yet, may come to carry any."""
    return len({one for value, one in zip(values, flows, strict=True) if not isinstance(value, Const | None)}) < 2


def flow(flows: list[Flow]) -> Flow:
    return next((one for one in flows if one != PLAIN), PLAIN)


def differ(values: list[Value | None]) -> bool:
    first = values[0]
    return any(value is not first and value != first for value in values)


def plain(name: str, value: Value | None, kept: Set[str]) -> bool:
    """Whether a value may be forgotten: no test around precision asks for its name, and it is nothing that precision is made of."""
    if name in kept or is_kept(name):
        return False
    match value:
        case None | Const() | Sym() | Cond():
            return True
        case External():  # a dtype, or a class of optimizers or scalers
            return value.name not in DTYPES and (SCHEDULERS in value.name or not is_kept(value.name))
        case Obj(cls=External(name=cls)):
            return cls in ("builtins.list", "builtins.dict") or cls.startswith("torch.nn.")
        case Obj(cls=Class(cls=definition)):
            return not is_kept(definition.name)
        case Tup():
            return all(plain("", item, kept) for item in value.items)
        case Func():  # which of two trains is the whole difference
            return not value.module.is_strong(value.function)
        case Stream() | Many() | Method():
            return True
    return False


def drop_facts(group: list[State], kept: Set[str]) -> None:
    """Forgets decisions that no test around precision asks for."""
    stale = {sym for state in group for sym in state.facts if not is_asked(sym.text, kept)}
    for state in group:
        for sym in stale:
            state.facts.pop(sym, None)
