"""The project's own ops where they are defined: those whose dtypes matter, and which neither autocast nor they themselves bring to one."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Literal

from precisionlint.source.op_bodies import ALIGNS, LAUNCHES, MULTIPLIES, WEIGHTS, settles
from precisionlint.valueflow import Defined

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame
    from precisionlint.source.flow.heap import Class

REGISTERS = b"register_autocast"
OPS = frozenset({"torch.library.custom_op", "torch.library.triton_op"})


def function(frame: Frame, cls: Class) -> None:
    """Tells of an autograd.Function that keeps what its forward multiplies for a backward that runs outside the region."""
    forward = cls.methods.get("forward")
    if cls.kind != "function" or forward is None or isinstance(forward.node, ast.Lambda):
        return
    if any("custom_fwd" in ast.unparse(each) for each in forward.node.decorator_list):
        return
    backward = cls.methods.get("backward")
    if backward is not None and settles(ast.unparse(backward.node)):
        return
    setup = cls.methods.get("setup_context")
    kept = setup.node if setup is not None else forward.node
    if "save_for_backward" in ast.unparse(kept):
        tell(frame, cls.node, forward.node, "function", skip=1)


def op(frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Tells of an op made with torch.library in a file that registers none with autocast."""
    for decorator in node.decorator_list:
        made = frame.expr(decorator.func) if isinstance(decorator, ast.Call) else None
        if made is not None and made.name in OPS and REGISTERS not in frame.source.file.data:
            tell(frame, node, node, "op")


def tell(
    frame: Frame,
    at: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    kind: Literal["function", "op"],
    skip: int = 0,
) -> None:
    """Tells of an op if its body multiplies, or hands a weight to a kernel, and casts nothing. ``skip``: parameters that are no inputs."""
    body = "\n".join(ast.unparse(each) for each in node.body)
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][skip:]
    sizes = {"W", "w"} if {"H", "h"} & set(names) else set()
    mixes = any(WEIGHTS.fullmatch(name) for name in names if name not in sizes) and len(names) > 1
    if settles(body) or ALIGNS.search(body) or not (MULTIPLIES.search(body) or (mixes and LAUNCHES.search(body))):
        return
    frame.tell(Defined(frame.at(at), (), at.name, kind, mixes))
