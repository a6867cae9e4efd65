"""Buffers of modules, and the dtype that these are made in."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from precisionlint.recipes import HALVES
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.valueflow import Value

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame


def register_buffer(frame: Frame, obj: Value, args: list[Value], node: ast.Call) -> None:
    name = args[0].constant if args[0].op == "constant" else None
    if not isinstance(name, str) or obj.ref is None:
        return
    ref = "chosen" if args[1].dtypes == frozenset({"float32"}) and chooses_half(frame) else None
    made, before = (
        Value("buffer", (args[1],), args[1].dtypes, frame.at(node), name, ref=ref),
        obj.ref.attributes.get(name),
    )
    if before is not None and obj.ref.settled:
        if frame.scope.setup:  # by the class of another object, which is cast with all that it holds
            obj.ref.attributes[name] = before
            return
        made = Value("buffer", (args[1],), made.dtypes | before.dtypes, made.at, name)  # the model may have been cast
    obj.ref.attributes[name] = made


def chooses_half(frame: Frame) -> bool:
    """Whether an object is made in a dtype that is half if nobody says otherwise: what it keeps in another, it means to."""
    spec = frame.function.node.args if frame.function is not None and frame.scope.setup else None
    parameters = [*spec.posonlyargs, *spec.args] if spec is not None else []
    defaults = zip(reversed(parameters), reversed(spec.defaults), strict=False) if spec is not None else ()
    return any(
        "dtype" in param.arg and frame.expr(default).name.removeprefix("torch.") in HALVES
        for param, default in defaults
    )


def read_beyond_tables(cls: ast.ClassDef, name: str) -> bool:
    """Whether a class makes its tables while it is made itself, and reads a buffer again only for more than these hold: ``if seq_len >
    self.max_seq_len_cached``. A cast of the model then rounds what nothing reads as long as they are long enough."""
    methods = {one.name: one for one in cls.body if isinstance(one, FunctionDef)}
    init = methods.get("__init__")
    if init is None:
        return False
    makers = [methods[called] for called in sorted(called_on_self(init) & methods.keys())]
    if not any(TURNED in ast.unparse(one) for one in (init, *makers)):
        return False
    words = {name, *(one.name for one in makers if f"self.{name}" in ast.unparse(one))}
    reads = [
        (each, method)
        for method in methods.values()
        if method is not init and method.name not in words
        for each in walk(method)
        if isinstance(each, ast.Attribute) and each.attr in words and ast.unparse(each.value) == "self"
    ]
    return bool(reads) and all(id(each) in beyond(method) for each, method in reads)


TURNED = "cos("
ORDERED = (ast.Gt, ast.GtE, ast.Lt, ast.LtE)


def called_on_self(method: FunctionDef) -> set[str]:
    return {
        each.func.attr
        for each in walk(method)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and ast.unparse(each.func.value) == "self"
    }


def beyond(method: FunctionDef) -> set[int]:
    """The nodes of a method that stand where something is more than what its object keeps."""
    return {
        id(inner)
        for each in walk(method)
        if isinstance(each, ast.If) and isinstance(each.test, ast.Compare) and isinstance(each.test.ops[0], ORDERED)
        if any(ast.unparse(side).startswith("self.") for side in (each.test.left, *each.test.comparators))
        for statement in each.body
        for inner in walk(statement)
    }
