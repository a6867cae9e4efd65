"""What a path can still get at. The rest is dropped, so that paths that differ only in it are one path again."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import compress
from operator import is_not
from typing import Any

from precisionlint.source.differing import differing
from precisionlint.source.state import State
from precisionlint.source.values import (
    Class,
    Cond,
    External,
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
EMPTY: dict[Any, Any] = {}
CACHE = 20_000
"""How many dictionaries' leaves are remembered."""


class Collector:
    """Collects garbage; remembers what each dictionary refers to, since states share the ones that they did not write."""

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[dict[Any, Value], Leaves]] = {}
        self._frames: dict[int, dict[Any, Value]] = {}
        self._heap: dict[Value, dict[Any, Value]] = {}
        self._settled: set[Any] = set()

    def settle(self, layer: State) -> None:
        """Takes what an imported module left for alive, whoever asks: only what a path has changed in it is looked at again."""
        self._frames.update(layer.frames)
        self._heap.update(layer.heap)
        todo: list[Any] = list(layer.heap)
        for scope in (*layer.frames.values(), *layer.heap.values()):
            todo.extend(leaves_of(scope.values()))
        self.reach(todo, self._settled, {}, EMPTY)

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

    def collect(self, states: list[State]) -> None:
        """Drops objects that nothing refers to, and facts about values that nothing can ask for again."""
        frames, heap = states[0].frames, states[0].heap
        own_frames = differing([state.frames for state in states])
        own_objects = dict.fromkeys(differing([state.heap for state in states]))
        for state in states:
            state.owned = set()  # what is remembered of a dictionary must not change under the same identity
        # What all the paths share is gone through once.
        shared = self._settled.copy()
        todo: list[Any] = []
        for frame, scope in frames.items():
            if self._frames.get(frame) is not scope and frame not in own_frames:
                todo.extend(self.leaves(scope))
        now = map(heap.get, self._heap, self._heap.values())
        for obj in compress(self._heap, map(is_not, now, self._heap.values())):
            if obj not in own_objects:
                todo.extend(self.leaves(heap[obj]))
        self.reach(todo, shared, heap, own_objects)
        met = [obj for obj in own_objects if obj in shared]
        for state in states:
            live = shared.copy()
            todo = list(leaves_of(state.pins))
            for frame in own_frames:
                todo.extend(self.leaves(state.frames.get(frame, EMPTY)))
            for obj in met:
                todo.extend(self.leaves(state.heap.get(obj, EMPTY)))
            self.reach(todo, live, state.heap, EMPTY)
            drop(state, live)

    def reach(
        self, todo: list[Any], live: set[Any], heap: dict[Value, dict[Any, Value]], apart: Container[Any]
    ) -> None:
        """Adds to ``live`` what can be got at from these, but not through the objects that stand apart."""
        while todo:
            value = todo.pop()
            if value in live:
                continue
            live.add(value)
            attributes = heap.get(value)
            if attributes is not None and value not in apart:
                todo.extend(self.leaves(attributes))
            if isinstance(value, Sym):
                if value.parts is None:
                    inner = [part for part in value.key if isinstance(part, (Sym, Obj, Cond))]
                    value.parts = tuple(leaves_of([*value.of, *inner]))
                todo.extend(value.parts)


def drop(state: State, live: set[Any]) -> None:
    """Drops what is not alive. What is set in an outside package (a default dtype) holds for whoever asks."""
    for obj in set(state.heap) - live:  # sets take over the hashes of a dictionary: most of it is alive
        if not isinstance(obj, (Class, External)) and not (isinstance(obj, Sym) and askable(obj, live, 0)):
            del state.heap[obj]
    for sym in set(state.facts) - live:
        if not askable(sym, live, 0):
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
