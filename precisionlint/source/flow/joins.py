"""Values and variables of several paths as one, and the parts of values."""

from __future__ import annotations

from typing import Any

from precisionlint.source.differing import differing
from precisionlint.source.flow.heap import NOTHING, Environment
from precisionlint.valueflow import INT64, NUMBER, WEIGHTS, Dtypes, Value


def either(values: list[Value]) -> Value:
    """One of several values; those that say nothing of a tensor (None) are left out."""
    told = [v for v in values if not (v.op == "constant" and v.constant is None)]
    # A module that a branch imports again is the one that it was.
    distinct = list({v.name if v.op == "external" else id(v): v for v in told}.values())
    if len(distinct) > 1:  # what a list holds before it is filled says nothing of what it holds
        distinct = [v for v in distinct if v.op != "tuple" or v.inputs] or distinct[:1]
    if len(distinct) == 1:
        return distinct[0]
    if not distinct:
        return values[0] if values else NOTHING
    ops = {v.op for v in distinct}
    if ops == {"unknown"} and all(v.ref is None for v in distinct):
        return distinct[0]
    if ops == {"constant"} and len({repr(v.constant) for v in distinct}) == 1:
        return distinct[0]
    dtypes: Dtypes = frozenset().union(*(value.dtypes for value in distinct))
    flat = [inner for value in distinct for inner in (value.inputs if value.op == "either" else (value,))]
    flat = list({id(v): v for v in flat}.values())[:8]
    return Value("either", tuple(flat), dtypes, distinct[0].at, distinct[0].name)


def join(environments: list[Environment]) -> Environment:
    """The variables after branches of which one ran."""
    if len(environments) == 1:
        return environments[0]
    merged = dict(environments[0])
    for name in differing(environments):
        values = [environment[name] for environment in environments if name in environment]
        if name.startswith("self.") and len(values) < len(environments):
            merged.pop(name, None)  # elsewhere it is what the class holds
            continue
        merged[name] = values[0] if all(value is values[0] for value in values) else either(values)
    return merged


LISTED = 8
"""How many members of a list are told apart."""


def appended(held: Value, value: Value, again: bool) -> Value | None:
    """A list with one more member; None for what is no list. ``again``: it may run any number of times."""
    lists = held.inputs if held.op == "either" else (held,)
    if not all(each.op in ("tuple", "many") for each in lists):
        return None
    if held.op == "tuple" and not again and len(held.inputs) < LISTED:
        return Value("tuple", (*held.inputs, value), at=held.at)
    members = either([*(member for each in lists for member in each.inputs), value])
    return Value("many", (members,), members.dtypes, held.at)


def unpacked(value: Value, index: int, at: Any, name: str = "") -> Value:
    """A part of a value that is unpacked, into a variable of this name."""
    match value.op:
        case "tuple" if index < len(value.inputs):
            return value.inputs[index]
        case "topk" | "max" | "min" | "sort":
            return value if index == 0 else Value("argmax", value.inputs, INT64, value.at)
        case "var_mean" | "std_mean":
            op = "mean" if index else value.op.removesuffix("_mean")
            return Value(op, value.inputs, value.dtypes, value.at, name, options=value.options)
        case "constant" | "unknown" | "dict":
            return NOTHING
        case "size":
            return Value("constant", (), NUMBER, at, name)
        case "many":
            return value.inputs[0]
    return Value("index", (value,), value.dtypes, at, name or value.name)


def element(value: Value, at: Any) -> Value:
    """What a loop over a value gives."""
    match value.op:
        case "tuple":
            return either(list(value.inputs)) if value.inputs else NOTHING
        case "many":
            return value.inputs[0]
        case "either" if all(each.op in ("tuple", "many") for each in value.inputs):
            return either([element(each, at) for each in value.inputs])
        case "enumerate":
            return Value("tuple", (Value("count", (), NUMBER), element(value.inputs[0], at)))
        case "zip":
            return Value("tuple", tuple(element(part, at) for part in value.inputs))
        case "range":
            return Value("count", (), NUMBER)
        case "parameters":
            return Value("weight", (), WEIGHTS, at, value.name)
        case "unknown" if value.ref is None and value.name:
            return value
        case "constant" | "unknown" | "external" | "builtin" | "dict":
            return NOTHING
        case "items":
            return Value("tuple", (NOTHING, element(value.inputs[0], at)))
    return Value("index", (value,), value.dtypes, at, value.name)
