"""Calls of other files' functions that were followed before: what they return, made of the arguments at hand.

Of a function of another file nothing is told but what it returns. One that is called again with arguments of the same form (the same
ops and dtypes, the same constants) returns the same graph over other leaves, so that graph is copied instead of being worked out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from precisionlint.source.flow.heap import Function
from precisionlint.source.flow.words import NO_TENSOR
from precisionlint.valueflow import NO_OPTIONS, Scope, Value

NEAR = 200
"""How many values of a result are copied, the nearest first: as far as ``valueflow.find`` looks."""
DEEPEST = 3
"""How far arguments inside each other (tuples, choices) are looked into."""
INSIDE = frozenset({"tuple", "dict", "many", "either", "view"})

Key = tuple[Any, ...]


class Call:
    """A call that was followed: how deep it stood, what it was given, and what it returned."""

    def __init__(self, depth: int, given: list[Value], result: Value) -> None:
        self.depth = depth
        self.given = given
        self.result = result

    @cached_property
    def near(self) -> frozenset[int]:
        """The values of the result that are copied, by their ids: as far as a pattern looks into it, and not through what was given."""
        given = {id(value) for value in self.given}
        near, todo = {id(self.result)}, [self.result]
        for value in todo:
            if id(value) in given or len(todo) > NEAR:
                continue
            for one in value.inputs:
                if id(one) not in near:
                    near.add(id(one))
                    todo.append(one)
        return frozenset(near)


class Remembered:
    """The calls of one reading."""

    def __init__(self) -> None:
        self.calls: dict[Key, Call] = {}

    def key(
        self,
        function: Function,
        args: list[Value],
        options: dict[str, Value],
        receiver: Value | None,
        scope: Scope,
        quiet: bool,
    ) -> Key | None:
        """What the result of a call hangs on, as far as it is looked into; None where that cannot be compared."""
        owner = receiver.ref if receiver is not None and receiver.op == "instance" else None
        key = (
            id(function.node),
            scope,
            quiet,
            form(receiver) if receiver is not None else None,
            owner.version if owner is not None else 0,
            tuple(form(arg) for arg in args),
            tuple((name, form(value)) for name, value in options.items()),
        )
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def again(self, key: Key, arguments: Iterable[Value], depth: int) -> Value | None:
        """What a call returned that was followed before, made of these arguments; None where there was none: what was called deeper was
        followed less far."""
        call = self.calls.get(key)
        if call is None or call.depth > depth:
            return None
        here = {id(old): new for old, new in zip(call.given, parts(arguments), strict=True)}
        return Copy(here, call.near).of(call.result)

    def keep(self, key: Key, arguments: Iterable[Value], depth: int, result: Value) -> None:
        self.calls[key] = Call(depth, list(parts(arguments)), result)


class Copy:
    """A graph with other leaves, as far as a pattern looks into it; what is further away stays as it was."""

    def __init__(self, leaves: dict[int, Value], near: frozenset[int]) -> None:
        self.made = leaves
        self.near = near

    def of(self, value: Value) -> Value:
        known = self.made.get(id(value))
        if known is not None:
            return known
        if id(value) not in self.near:
            return value
        self.made[id(value)] = value  # a value that is its own input, by way of what it stands for
        inputs = tuple([self.of(one) for one in value.inputs])
        options = {name: self.of(one) for name, one in value.options.items()} if value.options else NO_OPTIONS
        ref = self.reference(value.ref)
        if inputs != value.inputs or ref is not value.ref or any(value.options[n] is not o for n, o in options.items()):
            new = Value(value.op, inputs, value.dtypes, value.at, value.name, value.constant, options, ref)
            self.made[id(value)] = new
            return new
        return value

    def reference(self, ref: Any) -> Any:
        """What the reader keeps with a value: a table of values, or whose attribute it is."""
        if isinstance(ref, dict):
            table = {key: self.of(one) if isinstance(one, Value) else one for key, one in ref.items()}
            return ref if all(new is ref[key] for key, new in table.items()) else table
        if isinstance(ref, tuple) and any(isinstance(one, Value) for one in ref):
            parts = tuple(self.of(one) if isinstance(one, Value) else one for one in ref)
            return ref if all(new is old for new, old in zip(parts, ref, strict=True)) else parts
        return ref


def form(value: Value, depth: int = DEEPEST) -> Key:
    """What a value is, but for which one."""
    inner: Key = ()
    if value.op in INSIDE and depth:
        inner = tuple(form(one, depth - 1) for one in value.inputs)
    if value.op == "constant":
        return ("constant", type(value.constant), value.constant)
    if value.op in NO_TENSOR:
        ref = tuple(sorted(map(repr, value.ref))) if isinstance(value.ref, dict) else id(value.ref)
        return (value.op, value.name, ref if value.op not in ("tuple", "many", "unknown") else "", inner)
    return (value.op, value.dtypes, inner)


def parts(values: Iterable[Value], depth: int = DEEPEST) -> Iterator[Value]:
    """The values, and what ``form`` looks at inside them, in its order."""
    for value in values:
        yield value
        if value.op in INSIDE and depth:
            yield from parts(value.inputs, depth - 1)
