"""Buffers of modules, and the dtype that these are made in."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from precisionlint.recipes import HALVES
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
