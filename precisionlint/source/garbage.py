"""What a path can still get at. The rest is dropped, so that paths that differ only in it are one path again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from precisionlint.source.state import State
from precisionlint.source.values import (
    Class,
    Cond,
    Func,
    Manager,
    Many,
    Method,
    Obj,
    Partial,
    Stream,
    Super,
    Sym,
    Tensors,
    Tup,
    Value,
)

Leaves = tuple[Any, ...]
CACHE = 20_000
"""How many dictionaries' leaves are remembered."""


class Collector:
    """Collects garbage; remembers what each dictionary refers to, since states share the ones that they did not write."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[dict[Any, Value], Leaves]] = {}

    def leaves(self, values: dict[Any, Value]) -> Leaves:
        """The symbols, objects and classes that a dictionary's values are made of."""
        known = self._leaves.get(id(values))
        if known is not None and known[0] is values:
            return known[1]
        found = tuple(dict.fromkeys(leaves_of(values.values())))
        if len(self._leaves) > CACHE:
            self._leaves.clear()
        self._leaves[id(values)] = (values, found)
        return found

    def collect(self, state: State) -> None:
        """Drops objects that nothing refers to, and facts about values that nothing can ask for again."""
        owned = state.owned
        live: set[Any] = set()
        todo: list[Any] = list(leaves_of(state.pins))
        for frame, scope in state.frames.items():
            # What only this path writes may change under the same identity: nothing is remembered of it.
            todo.extend(leaves_of(scope.values()) if frame in owned else self.leaves(scope))
        heap = state.heap
        while todo:
            value = todo.pop()
            if value in live:
                continue
            live.add(value)
            if value in heap:
                attributes = heap[value]
                todo.extend(leaves_of(attributes.values()) if ("heap", value) in owned else self.leaves(attributes))
            if isinstance(value, Sym):
                if value.parts is None:
                    inner = [part for part in value.key if isinstance(part, (Sym, Obj, Cond))]
                    value.parts = tuple(leaves_of([*value.of, *inner]))
                todo.extend(value.parts)
        dead = [
            o
            for o in heap
            if o not in live and not (isinstance(o, Sym) and askable(o, live, 0)) and not isinstance(o, Class)
        ]
        for obj in dead:
            del heap[obj]
        for sym in [s for s in state.facts if not askable(s, live, 0)]:
            del state.facts[sym]


def leaves_of(values: Iterable[Value]) -> Iterable[Any]:
    todo = list(values)
    while todo:
        value = todo.pop()
        match value:
            case Sym() | Obj() | Class():
                yield value
                if isinstance(value, Obj) and isinstance(value.cls, Class):
                    yield value.cls
            case Cond():
                yield value.sym
            case Tup():
                todo.extend(value.items)
            case Many():
                todo.append(value.element)
            case Stream():
                todo.extend(value.parts)
            case Partial() | Manager():
                todo.append(value.func)
                todo.extend(arg for _, arg in value.args)
            case Method() | Super():
                todo.append(value.receiver)
            case Func():
                if value.receiver is not None:
                    todo.append(value.receiver)
            case Tensors():
                for path in value.weights or ():
                    yield path[0]


def askable(sym: Sym, live: set[Any], depth: int) -> bool:
    """Whether a program that holds ``live`` can still make this symbol: it holds it, or all that it is made of."""
    if sym in live:
        return True
    kind = sym.key[0]
    if kind == "free":
        return True
    if kind in ("site", "param") or depth > 12:
        return False
    for part in sym.key[1:]:
        if isinstance(part, Cond):
            part = part.sym
        if isinstance(part, Sym):
            if not askable(part, live, depth + 1):
                return False
        elif isinstance(part, Obj) and part not in live:
            return False
    return True
