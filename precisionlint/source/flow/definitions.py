"""The project's own ops where they are defined: those whose dtypes matter, and which neither autocast nor they themselves bring to one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from precisionlint.patterns import regex
from precisionlint.source.op_bodies import (
    ALIGNS,
    ASSIGNED,
    COUNTS,
    EXTENSIONS,
    KERNELS,
    LAUNCHES,
    MULTIPLIES,
    PRODUCT,
    QUANTISED,
    RETURNS,
    WEIGHTS,
    aligns,
    allocates_wide,
    is_complex,
    loads_cast,
    settles,
)
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.valueflow import Defined

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame
    from precisionlint.source.flow.heap import Class


REGISTERS = b"register_autocast"
DIFFERENTIABLE = b"register_autograd"
OPS = frozenset({"torch.library.custom_op", "torch.library.triton_op"})
KERNEL = regex(r"triton\.|(?:jit|autotune|heuristics)\b")
TENSORS = frozenset(
    {"contiguous", "stride", "shape", "size", "data_ptr", "numel", "new", "new_empty", "new_zeros", "is_cuda"}
)
"""What is asked of a tensor that goes to a kernel, whether or not it is kept for the backward."""
INTEGERS = frozenset({"int", "long", "bool", "byte"})
"""How a body makes integers of an input."""
HELPERS = 8
"""So many functions that a body calls are read as part of it."""


def function(frame: Frame, cls: Class) -> None:
    """Tells of an autograd.Function that keeps what its forward multiplies for a backward that runs outside the region."""
    forward = cls.methods.get("forward")
    if cls.kind != "function" or forward is None or isinstance(forward.node, ast.Lambda):
        return
    backward = cls.methods.get("backward")
    around = next((words for words in decorators(forward.node) if "custom_fwd" in words), "")
    if around and (
        "cast_inputs" in around or backward is None or any("custom_bwd" in w for w in decorators(backward.node))
    ):
        return
    if is_complex(ast.unparse(forward.node)):
        return
    back = ast.unparse(backward.node) if backward is not None else ""
    if settles(back) and not allocates_wide(back):
        return
    setup = cls.methods.get("setup_context")
    kept = setup.node if setup is not None else forward.node
    if "save_for_backward" in ast.unparse(kept) and not applied_to_casts(frame, cls.node.name):
        names = parameters(forward.node)[1:]
        tensors = (saved(kept) | asked(forward.node, TENSORS)) - asked(forward.node, INTEGERS)
        numbers = [name for name in tensors & set(names) if not COUNTS.search(name)]
        tell(
            frame,
            cls.node,
            forward.node,
            "function",
            names,
            len(numbers) > 1,
            cls,
            settles(back),
            back,
            deep=backward is not None and multiplies_below(frame, backward.node, cls),
            forward_only=bool(around),
        )


def decorators(node: FunctionDef | ast.Lambda) -> list[str]:
    return [] if isinstance(node, ast.Lambda) else [ast.unparse(each) for each in node.decorator_list]


def multiplies_below(frame: Frame, node: FunctionDef | ast.Lambda, cls: Class) -> bool:
    """Whether a backward multiplies in the functions that it calls, which bring nothing to one dtype."""
    if isinstance(node, ast.Lambda):
        return False
    whole = "\n".join(ast.unparse(each) for each in (node, *helpers(frame, node, cls)) if not is_kernel(each))
    return MULTIPLIES.search(whole) is not None and not settles(whole) and not ALIGNS.search(whole)


def applied_to_casts(frame: Frame, name: str) -> bool:
    """Whether its file brings the inputs to one dtype where it applies a function, or casts those of the module that does."""
    file = frame.source.file
    apply = f"{name}.apply"
    names = {apply} | {
        target.id
        for each in file.every(ast.Assign)
        if ast.unparse(each.value) == apply
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    calls = (each for each in file.every(ast.Call) if ast.unparse(each.func) in names)
    arguments = (ast.unparse(arg) for call in calls for arg in call.args)
    if any(settles(each) or ALIGNS.search(each) for each in arguments):
        return True
    return any(
        each.args.args[:1]
        and each.args.args[0].arg == "self"
        and any("custom_fwd" in ast.unparse(one) for one in each.decorator_list)
        for each in file.functions
    )


def op(frame: Frame, node: FunctionDef) -> None:
    """Tells of an op made with torch.library in a file that registers none with autocast."""
    for decorator in node.decorator_list:
        made = frame.expr(decorator.func) if isinstance(decorator, ast.Call) else None
        if made is not None and registers(made.name, decorator) and REGISTERS not in frame.source.file.data:
            tell(frame, decorator, node, "op", parameters(node), len(annotated(node)) > 1)
            if DIFFERENTIABLE in frame.source.file.data and RETURNS.search(ast.unparse(node)):
                frame.tell(Defined(frame.at(decorator), (), node.name, "op", False, True, follows=True))


def registers(name: str, decorator: ast.expr) -> bool:
    """Whether a decorator makes an op of a function: torch.library's, or one that a program wraps under the same name, by what it asks for."""
    return name in OPS or (
        name.rpartition(".")[2] in ("custom_op", "triton_op") and "mutates_args=" in ast.unparse(decorator)
    )


def parameters(node: FunctionDef) -> list[str]:
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args)]


def annotated(node: FunctionDef) -> list[str]:
    """The inputs that are tensors of numbers, by their annotations and names."""
    return [
        each.arg
        for each in (*node.args.posonlyargs, *node.args.args)
        if each.annotation is not None
        and ast.unparse(each.annotation).rpartition(".")[2] == "Tensor"
        and not COUNTS.search(each.arg)
    ]


def asked(node: ast.AST, what: frozenset[str]) -> set[str]:
    """The variables of which a body asks an attribute or calls a method of those named."""
    return {
        each.value.id
        for each in walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.attr in what
    }


def saved(node: ast.AST) -> set[str]:
    """The variables that are kept for the backward."""
    return {
        arg.id
        for call in walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "save_for_backward"
        for arg in call.args
        if isinstance(arg, ast.Name)
    }


def tell(
    frame: Frame,
    at: ast.expr | ast.ClassDef,
    node: FunctionDef,
    kind: Literal["function", "op"],
    names: list[str],
    several: bool,
    cls: Class | None = None,
    settled: bool = False,
    back: str = "",
    deep: bool = False,
    forward_only: bool = False,
) -> None:
    """Tells of an op if its body multiplies (or it is called a product), or hands a weight or several inputs to a kernel, and casts nothing.

    ``names``: its inputs; ``several``: it takes, or keeps, more than one tensor; ``back``: its backward, which brings nothing to one dtype
    unless it is ``settled``; ``deep``: that multiplies as well, in functions that it calls if not by itself, so that those of the forward are
    read for products too; ``forward_only``: the forward has custom_fwd.

    That an input takes the dtype of another settles what a kernel gets. Of the operand of a product that says nothing: autocast casts it once
    more, so that the result is half all the same, and its gradient meets what was saved in another dtype.
    """
    body = "\n".join(ast.unparse(each) for each in node.body)
    called = list(helpers(frame, node, cls))
    whole = "\n".join([body, *(ast.unparse(each) for each in called if not is_kernel(each))])
    if settles(whole) and not allocates_wide(whole):
        return
    multiplies = MULTIPLIES.search(whole if deep else body) is not None
    again = multiplies and MULTIPLIES.search(back) and not ALIGNS.search(back) and not ASSIGNED.search(whole)
    if aligns(whole, names) and not again:
        return
    if loads_cast("\n".join(ast.unparse(each) for each in called if is_kernel(each))):
        return
    sizes = ({"W", "w"} if {"H", "h"} & set(names) else set()) | ({"gamma"} if "alpha" in names else set())
    mixes = any(WEIGHTS.fullmatch(name) for name in names if name not in sizes) and len(names) > 1
    hands = mixes and LAUNCHES.search(body) and not any(QUANTISED.search(name) for name in names)
    by_itself = not settled and not settles(whole) and (multiplies or hands)
    launches = any(found.search(whole) for found in (LAUNCHES, EXTENSIONS)) or hands_to_kernels(frame, node, names)
    product = kind == "op" and (MULTIPLIES.search(whole) or PRODUCT.search(node.name))
    if by_itself or (several and (launches or product)):
        name = cls.node.name if cls is not None else node.name
        frame.tell(
            Defined(frame.at(at), (), name, kind, bool(by_itself) and mixes, not multiplies, forward_only=forward_only)
        )


def hands_to_kernels(frame: Frame, node: FunctionDef, names: list[str]) -> bool:
    """Whether a body hands several of its inputs, none of a weight in few bits, to a function from a module of kernels that is not there to be
    read."""
    if any(QUANTISED.search(name) for name in names):
        return False
    for call in walk(node):
        if not isinstance(call, ast.Call):
            continue
        root = call.func
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        of = frame.lookup(root.id) if isinstance(root, ast.Name) and root.id not in names else None
        several = sum(isinstance(arg, ast.Name) and arg.id in names for arg in call.args) > 1
        if several and of is not None and of.op == "external" and KERNELS.search(of.name):
            return True
    return False


def is_kernel(node: FunctionDef) -> bool:
    return any(KERNEL.match(ast.unparse(each)) for each in node.decorator_list)


def helpers(frame: Frame, node: FunctionDef, cls: Class | None) -> Iterator[FunctionDef]:
    """The functions of this file, and those that it imports, that a body calls or launches, and those that they call."""
    todo = [node]
    seen = [node]
    while todo and len(seen) <= HELPERS:
        for call in walk(todo.pop()):
            called = definition(frame, call.func, cls) if isinstance(call, ast.Call) else None
            if called is not None and called not in seen:
                seen.append(called)
                todo.append(called)
                yield called


def definition(frame: Frame, func: ast.expr, cls: Class | None) -> FunctionDef | None:
    """The function that is called, by its name, as a method of the op's own class, or as a kernel over a grid."""
    if isinstance(func, ast.Subscript):
        func = func.value
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and cls is not None:
        method = cls.methods.get(func.attr) if func.value.id in ("cls", cls.node.name) else None
        return method.node if method is not None and isinstance(method.node, FunctionDef) else None
    if not isinstance(func, ast.Name):
        return None
    made = next((each for each in frame.source.makers.get(func.id, []) if isinstance(each, FunctionDef)), None)
    of = frame.lookup(func.id) if made is None else None
    imported = frame.flow.resolve(of) if of is not None and of.op == "import" else None
    node = imported.ref.node if imported is not None and imported.op == "function" else made
    return node if isinstance(node, FunctionDef) else None
