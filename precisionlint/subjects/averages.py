"""Running averages of weights that a program writes itself: blends of one tensor into another, by a factor and what is left of 1.

Read where they stand, by their spelling: which dtype the weights have is their caller's affair. What handles dtypes in the same class is
left alone, and so are averages of statistics and of gradients.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from precisionlint.facts import SLOW, Average
from precisionlint.patterns import regex
from precisionlint.source.parsing import walk
from precisionlint.subjects import File
from precisionlint.subjects.optimizers import COUNTS

WEIGHTS = regex(r"parameters\(|state_dict\(|param(?:eter)?s?\b")
NAMED = regex(r"ema|averag|\bavg(?!_?pool)|shadow|teacher|target|momentum|polyak|decay", re.I)
AWARE = regex(r"\.float\(\)|\.double\(\)|float32|float64|fp32|\.dtype|dtype\s*=|kahan|stochastic|codebook|cluster")
"""What says that dtypes were thought of, or that it is a codebook's affair."""
HALVED = regex(r"\.half\(\)|\.bfloat16\(\)|\.to\((?:dtype=)?torch\.(?:b?float16|half)\)")
"""How a blend casts what it adds to half, whatever else around it speaks of."""
STEPPING = regex(r"\bgrads?\b|\bexp_avg|Optimizer|momentum_buf")
"""What an optimizer has; one that is called an average holds an average of weights all the same."""
HOLDS = regex(r"(?:^|_)ema(?:_|$)|^ema|averaged?_model|shadow_model", re.I)
"""What a model is called that holds an average of weights; a class of them ends or begins so."""
MAKES = regex(r"^EMA|EMA(?:Model)?$|^ExponentialMovingAverage")
CAST = regex(r"dtype|precision")
STEPS = regex(
    r"\.backward\(|\bupdate_ema\(|\w*ema\w*\.(?:step|update)\(|\bema_(?:update|decay|beta|rate|iters|start_iters)\b"
)
ASIDE = regex(r"valid|infer|sampl|save|export|eval|log_|convert|test", re.I)
"""Functions that look at an average, or write it, in a dtype of their own."""


def read(file: File) -> Iterator[Average]:
    """The averages of weights in a file, in its order."""
    yield from _cast(file)
    for node in file.functions:
        own = _text(file, node)
        if not WEIGHTS.search(own):
            continue
        # A class of averages says in its other methods what it holds; a trainer has other affairs.
        owner = file.owners.get(node)
        holder = owner if owner is not None and NAMED.search(owner.name) else node
        around = _text(file, holder)
        if isinstance(holder, ast.ClassDef):  # what moves it says nothing of what it is averaged in
            for method in holder.body:
                if isinstance(method, ast.FunctionDef) and method.name == "to":
                    around = around.replace(_text(file, method), "")
        if not NAMED.search(around):
            continue
        aware = AWARE.search(around) is not None
        if STEPPING.search(around) and not (isinstance(holder, ast.ClassDef) and MAKES.search(holder.name)):
            continue
        for each in walk(node):
            if isinstance(each, (ast.Call, ast.BinOp)) and _blends(each):
                half = HALVED.search(ast.unparse(each))
                if half is not None or not aware:
                    yield Average(file.place(each), (), half=half[0] if half is not None else "")
            for name in ("body", "orelse") if not aware else ():
                block = getattr(each, name, None)
                if isinstance(block, list):
                    yield from (Average(file.place(added), ()) for added in _in_two_steps(block))


def _cast(file: File) -> Iterator[Average]:
    """``ema_model.to(dtype=weight_dtype)``, ``EMAModel(model, dtype=weight_dtype)``, where the file sets that to half and trains."""
    calls = [each for each in file.every(ast.Call) if _asks(each)]
    if not calls or not STEPS.search("\n".join(file.lines)):
        return
    halves = {
        target.id
        for each in file.every(ast.Assign)
        if _half(each.value)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    for call in calls:
        name = _asks(call)
        inside = (each for each in file.functions if each.lineno <= call.lineno <= (each.end_lineno or 0))
        if name in halves and not any(ASIDE.search(each.name) for each in inside):
            yield Average(file.place(call), (), name)


def _asks(call: ast.Call) -> str:
    """The name of the dtype that a call gives a model of averages, ``""`` if it gives none."""
    func = call.func
    last = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "dtype"]
    if isinstance(func, ast.Attribute) and last == "to":
        held = func.value
        name = held.attr if isinstance(held, ast.Attribute) else held.id if isinstance(held, ast.Name) else ""
        if not HOLDS.search(name):
            return ""
        given += call.args
    elif not MAKES.search(last):
        return ""
    return next((each.id for each in given if isinstance(each, ast.Name) and CAST.search(each.id)), "")


def _half(node: ast.expr) -> bool:
    """Whether a name may be set to half."""
    if isinstance(node, ast.IfExp):
        return _half(node.body) or _half(node.orelse)
    chosen = isinstance(node, ast.Call) and ast.unparse(node).startswith("getattr(torch, ")  # by a setting
    return chosen or ast.unparse(node) in ("torch.float16", "torch.bfloat16", "torch.half")


def _text(file: File, node: ast.stmt) -> str:
    """Its text without comments, documentation and numbers that are made tensors."""
    return COUNTS.sub("", file.code(node))


def _blends(node: ast.Call | ast.BinOp) -> bool:
    """``x.lerp_(y, 1 - d)``, ``x.mul_(d).add_(y, alpha=1 - d)``, ``x.mul_(d).add_((1 - d) * y)``, ``d * x + (1 - d) * y``,
    ``x.sub_((1 - d) * (x - y))``, ``x.add_((1 - d) * (y - x))``: most of the old value is kept."""
    match node:
        case ast.Call(ast.Attribute(_, "lerp_"), [_, weight]) | ast.Call(
            ast.Attribute(ast.Name("torch"), "lerp" | "_foreach_lerp_"), [_, _, weight]
        ):
            return _left(weight) is not None
        case ast.Call(ast.Attribute(ast.Call(ast.Attribute(_, "mul_"), [kept]), "add_"), [added]):
            return any(_complement(kept, share) for share in _shares(node, added))
        case ast.Call(ast.Attribute(own, "sub_"), [ast.BinOp(left, ast.Mult(), right)]):
            return any(_difference(each, of=own) for each in (left, right))
        case ast.Call(ast.Attribute(own, "add_"), [ast.BinOp(left, ast.Mult(), right)]):
            return any(_difference(each, less=own) for each in (left, right))
        case ast.Call(ast.Attribute(own, "add_"), [ast.BinOp() as moved]) if _difference(moved, less=own):
            return any(keyword.arg == "alpha" for keyword in node.keywords)
        case ast.BinOp(left, ast.Add(), right):
            return any(_complement(a, b) for a in _factors(left) for b in _factors(right))
    return False


def _difference(node: ast.expr, of: ast.expr | None = None, less: ast.expr | None = None) -> bool:
    """Whether an expression is a difference of one thing, or from it."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return False
    side, own = (node.left, of) if of is not None else (node.right, less)
    return own is not None and ast.unparse(side) == ast.unparse(own)


def _in_two_steps(block: list[ast.stmt]) -> Iterator[ast.expr | ast.stmt]:
    """``x *= d`` and then ``x += (1 - d) * y``; ``x.mul_(d)`` and ``x.add_(y, alpha=1 - d)``; the same over lists with ``torch._foreach_mul_``."""
    kept: dict[str, ast.expr] = {}
    for each in block:
        match each:
            case ast.AugAssign(target, ast.Mult(), factor):
                kept[ast.unparse(target)] = factor
            case ast.Expr(ast.Call(ast.Attribute(own, "mul_"), [factor])) | ast.Expr(
                ast.Call(ast.Attribute(ast.Name("torch"), "_foreach_mul_"), [own, factor])
            ):
                kept[ast.unparse(own)] = factor
            case ast.AugAssign(target, ast.Add(), added) if (
                name := ast.unparse(target)
            ) in kept and "loss" not in name:
                if any(_complement(kept[name], share) for share in _factors(added)):
                    yield each
            case ast.Expr(ast.Call(ast.Attribute(own, "add_"), [added]) as call) | ast.Expr(
                ast.Call(ast.Attribute(ast.Name("torch"), "_foreach_add_"), [own, added]) as call
            ) if (name := ast.unparse(own)) in kept:
                if any(_complement(kept[name], share) for share in _shares(call, added)):
                    yield call


def _shares(call: ast.Call, added: ast.expr) -> list[ast.expr]:
    """By what a call of ``add_`` may multiply what it adds."""
    return [*(keyword.value for keyword in call.keywords if keyword.arg == "alpha"), *_factors(added)]


def _factors(node: ast.expr) -> list[ast.expr]:
    return [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else []


def _left(node: ast.expr) -> ast.expr | None:
    """d of ``1 - d``."""
    match node:
        case ast.BinOp(ast.Constant(1 | 1.0), ast.Sub(), right):
            return right
    return None


def _complement(one: ast.expr, other: ast.expr) -> bool:
    """Whether two factors are d and 1 - d, and the old value is kept for long as far as is known."""
    for kept, rest in ((one, other), (other, one)):
        left = _left(rest)
        if left is not None and ast.unparse(left) == ast.unparse(kept):
            return not isinstance(kept, ast.Constant) or (isinstance(kept.value, float) and kept.value >= SLOW)
    numbers = [each.value for each in (one, other) if isinstance(each, ast.Constant)]
    known = [number for number in numbers if isinstance(number, float)]
    return len(known) == 2 and abs(sum(known) - 1) < 1e-9 and max(known) >= SLOW
