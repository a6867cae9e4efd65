"""Optimizers that a program writes itself: the dtype of their moments, and of the arithmetic with them.

Read where it stands, by the names that Adam's descendants give it: the second moment, and where an optimizer has none, what else it
averages gradients in. What makes up for the rounding (a compensation, stochastic rounding, fp32 masters) is left alone, and so is a moment
that is cast to fp32 where it is used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from precisionlint.facts import Moment
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.source.flow.words import TEST_PATH
from precisionlint.source.parsing import walk
from precisionlint.subjects import File
from precisionlint.subjects.tree import constant

SECOND = regex(
    r"(?<!max_)(?:exp_avg_(?:sq|var)|square_avg|second_moment|moment_?2)|(?:^|_)variance$|^(?:nu|(?:momentum_)?v|v_?mean)$"
)
"""What the running average of squared gradients is called."""
SECOND_NAMED = regex(r"exp_avg_(?:sq|var)|square_avg|second_moment|variance")
FIRST = regex(
    r"^(?:exp_avg|grad_avg|avg_grad|mom(?:entum)?\w*|m|m1|ema|velocity|buf\w*|first_moment)$|(?:^|_)(?:exp_avg|momentum)$"
)
"""What the running average, or sum, of gradients is called in the state of an optimizer."""
GRADIENT = regex(r"^(?:grads?|g|gradient|d_p|update)$|_grad$|^grad_")
MADE = ("zeros_like", "zeros", "empty_like", "empty", "full_like", "full", "new_zeros", "clone")
CAREFUL = regex(r"kahan|compensat|stochastic|master|error_feedback|(?<!grad_)residual|round", re.I)
OF_THE_WEIGHT = regex(
    r"\w*stochastic\w*\(\s*(?:p|w|params?|weights?)\b(?:[^()]|\([^()]*\))*\)|\bself\.\w*stochastic_round\w*|\[\s*[\"']\w*stochastic_round\w*[\"']\s*\]"
)
"""What rounds the weight alone with care, and the setting that asks for it: the moments are rounded all the same."""
UPDATES = regex(r"exp_avg|square_avg|second_moment|variance|addcmul_|mul_\(")
"""What only a function holds that averages anything."""
OF_GRADIENTS = regex(r"\.grad\b|\bstate\[|\bgrads?\b")
COMMENT = regex(r"#[^\n]*")
COUNTS = regex(r"torch\.(?:scalar_)?tensor\((?:[^()]|\([^()]*\))*\)(?:\.\w+\([^()]*\))*")
"""A number made a tensor: its dtype is no moment's."""
WIDE = regex(r"\.float\(\)|\.double\(\)|float32|float64|fp32|\.to\(\s*dtype\s*=|promote")


WEIGHT = regex(r"^(?:p|w)$|param|weight")
OF_WEIGHTS = regex(r"^(?:p|params?|parameter|w|weight)$|(?:^|_)grads?(?:_chunk)?$|^g$")
"""What a weight or its gradient is called."""


def read(file: File) -> Iterator[Moment]:
    """The moments of a file's optimizers: where they are made, and where they are averaged as they are. Of an optimizer that has a second
    moment, that alone: less is left of it than of the first."""
    first: list[tuple[ast.stmt, Moment]] = []
    second: set[ast.stmt] = set()
    for node in file.functions:
        text = "\n".join(file.lines[node.lineno - 1 : node.end_lineno])
        if not UPDATES.search(text) or _is_outer(node):
            continue
        text = COMMENT.sub("", text)
        outer = file.owners.get(node, node)
        around = file.code(outer)
        if not UPDATES.search(text) or CAREFUL.search(OF_THE_WEIGHT.sub("", around)):
            continue
        own = [each for each in walk(node) if isinstance(each, (ast.Assign, ast.Call))]
        found = [each for each in _kept(file, own, text) if not each.made or not TEST_PATH.search(file.display)]
        if not WIDE.search(COUNTS.sub("", text)):
            found += _averages(file, own, bool(OF_GRADIENTS.search(text)))
        yield from (each for each in found if not each.first)
        first += [(outer, each) for each in found if each.first]
        if any(not each.first for each in found) or SECOND_NAMED.search(around):
            second.add(outer)
    yield from (moment for outer, moment in first if outer not in second)


def _kept(file: File, own: list[ast.Assign | ast.Call], text: str) -> Iterator[Moment]:
    """``state["exp_avg_sq"] = torch.zeros_like(…)``: in half, or like the weights."""
    for each in own:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Subscript):
            first = _first(each.targets[0]) and not TEST_PATH.search(file.display)
            if not first and not _second(each.targets[0]):
                continue
            half = _made_in_half(each.value)
            made = not half and _made_like_weights(each.value, text)
            if made or (half and not first):
                yield Moment(file.place(each), (), _words(each.targets[0]), half, made, first)


def _is_outer(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function holds others, each of which is read by itself."""
    return any(isinstance(each, ast.FunctionDef) for each in walk(function) if each is not function)


def _averages(file: File, own: list[ast.Assign | ast.Call], of_gradients: bool) -> Iterator[Moment]:
    """``v.lerp(g.square(), 1 - beta)``, ``v.mul_(beta).addcmul_(g, g, …)``, ``v.mul_(beta).add_(g * g, …)``: in the dtype of ``v`` and ``g``.
    What averages squares of gradients is a second moment whatever it is called."""
    for call in own:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        holder, op = call.func.value, call.func.attr
        decayed = isinstance(holder, ast.Call) and isinstance(holder.func, ast.Attribute) and holder.func.attr == "mul_"
        if isinstance(holder, ast.Call) and isinstance(holder.func, ast.Attribute) and decayed:
            holder = holder.func.value
        known = _second(holder)
        if (
            (op in ("lerp", "lerp_") and known and _square(call.args[0]))
            or (op == "addcmul_" and decayed and (known or (of_gradients and _of_one(call.args))))
            or (op == "add_" and decayed and known and not _names_weight(call.args[0]))
            or (op == "add_" and decayed and of_gradients and _square(call.args[0]))
        ):
            yield Moment(file.place(call), (), _words(holder), "")
        elif of_gradients and _averages_gradient(call, decayed):
            yield Moment(file.place(call), (), _words(holder), "", first=True)


def _names_weight(node: ast.expr) -> bool:
    """Whether a tensor is a weight by its name: its average is no moment, whatever that is called."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and node.attr != "grad":
            node = node.value
        elif isinstance(node, ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        else:
            return False
    return bool(WEIGHT.search(node.id))


def _averages_gradient(call: ast.Call, decayed: bool) -> bool:
    """``m.lerp_(grad, 1 - beta)``, ``m.mul_(beta).add_(grad, alpha=1 - beta)``"""
    op = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    shares = [keyword.value for keyword in call.keywords if keyword.arg in ("alpha", "weight")] + call.args[1:]
    left = any(
        isinstance(share, ast.BinOp) and isinstance(share.op, ast.Sub) and constant(share.left) == 1 for share in shares
    )
    of = call.args[0]
    return (
        left
        and (op == "lerp_" or (op == "add_" and decayed))
        and isinstance(of, (ast.Name, ast.Attribute))
        and bool(GRADIENT.search(of.id if isinstance(of, ast.Name) else of.attr))
    )


def _first(target: ast.Subscript) -> bool:
    """Whether an item of the state is what gradients are averaged or summed up in, by its name."""
    key = constant(target.slice)
    return isinstance(key, str) and bool(FIRST.search(key)) and "state" in _words(target.value)


def _of_one(factors: list[ast.expr]) -> bool:
    """Whether both factors of a product are one tensor, the second conjugated or not."""
    names = [ast.unparse(factor).removesuffix(".conj()") for factor in factors[:2]]
    return len(names) == 2 and names[0] == names[1]


def _words(node: ast.expr) -> str:
    return ast.unparse(node)


def _second(node: ast.expr) -> bool:
    """Whether a target is the second moment: a variable, or an item of the state by its name."""
    if isinstance(node, ast.Subscript):
        key = constant(node.slice)
        return isinstance(key, str) and bool(SECOND.search(key))
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(SECOND.search(name))


def _square(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="square" | "pow" | "conj")) | ast.BinOp(op=ast.Pow()):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr="mean" | "sum"), args=[inner, *_]):
            return _square(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="mean" | "sum")):
            return _square(inner)
        case ast.BinOp(left, ast.Mult(), right):
            return _of_one([left, right]) or _square(left) or _square(right)
    return False


def _made_like_weights(value: ast.expr, text: str) -> bool:
    """``torch.zeros_like(p)``, ``grad.new_zeros(shape)``, ``torch.zeros(shape).type_as(grad)``, or several of them."""
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            return _made_like_weights(body, text) or _made_like_weights(orelse, text)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):  # of its rows and of its columns
            return any(_made_like_weights(part, text) for part in parts)
        case ast.Call(func=ast.Attribute(value=made, attr="detach" | "clone" | "contiguous"), args=[]):
            return _made_like_weights(made, text)
        case ast.Call(func=ast.Attribute(attr="type_as"), args=[of]):
            return _is_weight(of, text)
        case ast.Call(func=ast.Attribute(value=of, attr="new_zeros"), keywords=keywords):
            return not any(keyword.arg == "dtype" for keyword in keywords) and _is_weight(of, text)
        case ast.Call(func=ast.Attribute(attr="zeros" | "empty"), keywords=keywords):
            dtypes = (keyword.value for keyword in keywords if keyword.arg == "dtype")
            return any(
                isinstance(each, ast.Attribute) and each.attr == "dtype" and _is_weight(each.value, text)
                for each in dtypes
            )
        case ast.Call(func=ast.Attribute(attr="zeros_like"), args=[of, *_], keywords=keywords):
            if any(keyword.arg == "dtype" for keyword in keywords):
                return False
            return _is_weight(of, text)
    return False


def _is_weight(of: ast.expr, text: str) -> bool:
    """Whether something is a weight or a gradient by its name, that the function did not cast before."""
    while isinstance(of, (ast.Subscript, ast.Attribute)):
        of = of.value
    return isinstance(of, ast.Name) and bool(OF_WEIGHTS.search(of.id)) and not _cast(of.id, text)


def _cast(name: str, text: str) -> bool:
    """Whether a function makes fp32 of what it calls so."""
    return any(WIDE.search(line) for line in re.findall(rf"(?m)^\s*{name} = .*$", text))


def _made_in_half(value: ast.expr) -> str:
    """The half in which a tensor is made, by its ``dtype`` argument or a cast at the end."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    if value.func.attr in ("half", "bfloat16") and not value.args:
        return "fp16" if value.func.attr == "half" else "bf16"
    given = [keyword.value for keyword in value.keywords if keyword.arg == "dtype"]
    if value.func.attr == "to":
        given += value.args
    elif value.func.attr not in MADE:
        return ""
    halves = (HALVES.get(str(constant(each)), "") for each in given)
    return next((half for half in halves if half), "")
