"""Statements, each evaluated once along all paths: branches are joined, loops gone through twice."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from precisionlint.source.apis import USUAL
from precisionlint.source.flow import contexts, definitions
from precisionlint.source.flow.heap import NOTHING, Class, Environment, Function
from precisionlint.source.flow.joins import appended, element, join
from precisionlint.source.flow.torch_calls import dtypes_named
from precisionlint.source.flow.words import (
    BINARY,
    NO_TENSOR,
    ast_name,
    attempts,
    is_decided,
    is_property_setter,
    outlives,
)
from precisionlint.valueflow import (
    AMAX_NAME,
    HALF,
    UNKNOWN,
    VIEWS,
    WIDE,
    Dtypes,
    Returned,
    Value,
    constant,
    may_be_half,
    named,
    sources,
)

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

LOOPS = 3
"""How many loops inside each other are gone through twice."""


def branches(
    frame: Frame, *bodies: list[ast.stmt], told: Sequence[Environment] = (), evaluating: Sequence[bool] = ()
) -> int:
    """Blocks of which one runs: what they leave in the variables is joined. How many of them go on behind. ``told``: what is known of
    variables inside each of them alone; ``evaluating``: whether each runs only where nothing is trained."""
    before, gone = frame.names, frame.gone
    left: list[tuple[Environment, Environment]] = []
    frame.choices += 1
    for index, body in enumerate(bodies):
        known = told[index] if index < len(told) else {}
        frame.names, frame.gone = {**before, **known}, gone
        if index < len(evaluating) and evaluating[index]:
            scope = frame.scope
            frame.scope = structs.replace(scope, grad=False)
            frame.block(body)
            frame.scope = scope
        else:
            frame.block(body)
        if not frame.gone:
            left.append((frame.names, known))
    frame.choices -= 1
    if len(left) > 1:  # what a test told holds no longer; where every other branch has left, it does
        for names, known in left:
            names.update({name: before[name] for name in known if names[name] is known[name]})
    merged = join([names for names, _ in left]) if left else before
    before.clear()
    before.update(merged)
    frame.names, frame.gone = before, not left
    return len(left)


def if_(frame: Frame, node: ast.If) -> None:
    bodies: list[list[ast.stmt]] = []
    known: list[Environment] = []
    evaluating: list[bool] = []
    scope, trained = frame.scope, False
    while True:  # a chain of elif is one choice, however long
        contexts.narrow(frame, node.test)
        test = frame.expr(node.test)
        if contexts.asks_version(frame, node.test, test):
            frame.scope = structs.replace(scope, guarded="version")
        decided = is_decided(test) and isinstance(test.constant, (bool, type(None))) and frame.depth > 0
        if not decided or test.constant:
            bodies.append(node.body)
            known.append(told(frame, node.test))
            evaluating.append(trained or asks_training(node.test) is False)
        trained = trained or asks_training(node.test) is True
        if decided and test.constant:
            break
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            node = node.orelse[0]
            continue
        bodies.append(node.orelse)
        known.append(told(frame, node.test, otherwise=True))
        evaluating.append(trained)
        break
    if branches(frame, *bodies, told=known, evaluating=evaluating) == len(bodies):
        frame.scope = scope  # where a branch left, the rest is guarded like the others


def assert_(frame: Frame, node: ast.Assert) -> None:
    """What is claimed to be fp32 is so from here on; a claim of half says which halves are meant, and not that fp32 never comes."""
    frame.expr(node.test)
    frame.names.update({name: value for name, value in told(frame, node.test).items() if value.dtypes <= WIDE})


def asks_training(test: ast.expr) -> bool | None:
    """Whether a test asks if a module trains (True), or if it does not (False); None where it asks something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        asked = asks_training(test.operand)
        return None if asked is None else not asked
    return (
        True if isinstance(test, ast.Attribute) and test.attr == "training" and ast_name(test.value) == "self" else None
    )


def told(frame: Frame, test: ast.expr, otherwise: bool = False) -> Environment:
    """What a test tells of variables for the branch that it leads into, or for the other: a dtype (``x.dtype == torch.float16``,
    ``x.dtype in (torch.float32, torch.float64)``; what is no wide float may be half, as it may where nobody asks), or that a largest
    value is not zero (``amax > 0``)."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not otherwise:
        return {name: value for part in test.values for name, value in told(frame, part).items()}
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return told(frame, operand, not otherwise)
        case ast.Compare(left=ast.Attribute(value=ast.Name(name), attr="dtype"), ops=[op], comparators=[other]):
            old, dtypes = frame.names.get(name), dtypes_among(frame, other)
            if old is None or old.op in NO_TENSOR or dtypes is None or not dtypes <= HALF | WIDE:
                return {}
            if isinstance(op, (ast.Eq, ast.Is, ast.In)) is not otherwise:
                return {name: Value("view", (old,), dtypes, old.at, old.name)}
            before = old.inputs[0].dtypes if old.inputs else UNKNOWN  # without the test, which makes it unknown
            if "float32" in dtypes and may_be_half(before):
                return {name: Value("view", (old,), before, old.at, old.name)}
        case _ if (compared := to_number(test)) is not None:
            name, op, limit = compared
            value = frame.names.get(name)
            if value is not None and excludes_zero(op, limit, otherwise) and is_largest(value):
                return {name: Value("nonzero", (value,), value.dtypes, value.at)}
    return {}


MIRRORED: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.Gt(),
    ast.LtE: ast.GtE(),
    ast.Gt: ast.Lt(),
    ast.GtE: ast.LtE(),
}


def to_number(test: ast.expr) -> tuple[str, ast.cmpop, float] | None:
    """(a variable, how, the number) where a test compares the one to the other: ``amax.item() > 0``, ``0 < amax``, ``amax`` alone."""
    match test:
        case ast.Compare(left=ast.Constant(int() | float() as limit), ops=[how], comparators=[left]):
            op = MIRRORED.get(type(how), how)
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(int() | float() as limit)]):
            pass
        case _:
            left, op, limit = test, ast.NotEq(), 0
    if isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute) and left.func.attr == "item":
        left = left.func.value
    return (left.id, op, limit) if isinstance(left, ast.Name) else None


def excludes_zero(op: ast.cmpop, limit: float, otherwise: bool) -> bool:
    """Whether what compares so to a number is not zero, if it is no less than that; or ``otherwise``, if the comparison fails."""
    if otherwise:
        return (limit == 0 and isinstance(op, (ast.Eq, ast.LtE))) or (limit > 0 and isinstance(op, (ast.Lt, ast.LtE)))
    return limit >= 0 and isinstance(op, (ast.Gt, ast.NotEq) if limit == 0 else (ast.Gt, ast.GtE))


def is_largest(value: Value) -> bool:
    """Whether a value is the largest one of others, or is called the largest magnitude."""
    return named(value, AMAX_NAME) or any(
        source.op in ("amax", "max") for source in sources(value, VIEWS | {"cast", "number"})
    )


def dtypes_among(frame: Frame, node: ast.expr) -> Dtypes | None:
    """The dtypes that an expression names: one, or all of a tuple."""
    if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return dtypes_named(frame.expr(node))
    each = [dtypes_named(frame.expr(part)) for part in node.elts]
    return frozenset().union(*(one for one in each if one)) if each and all(each) else None


def keep(frame: Frame, node: ast.Call, args: list[Value], value: Value) -> None:
    """What a call leaves in variables of the function: a member of a list, or a result that ``out=`` says where to put."""
    match node.func:
        case ast.Attribute(value=ast.Name(name), attr="append") if name in frame.names and len(args) == 1:
            kept = appended(frame.names[name], args[0], frame.loops > 0)
            if kept is not None:
                frame.names[name] = kept
    for keyword in node.keywords:
        if keyword.arg == "out" and isinstance(keyword.value, ast.Name) and value.op not in ("unknown", "constructed"):
            frame.names[keyword.value.id] = value


def for_(frame: Frame, node: ast.For | ast.AsyncFor) -> None:
    over = frame.expr(node.iter)
    loop(frame, lambda: frame.assign(node.target, element(over, frame.at(node.iter))), node.body)
    frame.block(node.orelse)


def while_(frame: Frame, node: ast.While) -> None:
    loop(frame, lambda: frame.expr(node.test), node.body)
    frame.block(node.orelse)


def loop(frame: Frame, head: Any, body: list[ast.stmt]) -> None:
    """A body that runs any number of times: once from what stood before, once more from what it left."""
    before = dict(frame.names)
    frame.loops += 1
    for _ in range(2 if frame.loops <= LOOPS and not frame.quiet else 1):
        head()
        frame.block(body)
        frame.gone = False
        merged = join([before, frame.names])
        frame.names.clear()
        frame.names.update(merged)
    frame.loops -= 1


def with_(frame: Frame, node: ast.With | ast.AsyncWith) -> None:
    scope = frame.scope
    for item in node.items:
        context = frame.expr(item.context_expr)
        contexts.enter(frame, context)
        if item.optional_vars is not None:
            frame.assign(item.optional_vars, NOTHING)
    frame.block(node.body)
    frame.scope = scope


def try_(frame: Frame, node: Any) -> None:
    scope = frame.scope
    if attempts(node) and not scope.guarded:
        frame.scope = structs.replace(scope, guarded="try")
    branches(frame, node.body + node.orelse, *[handler.body for handler in node.handlers])
    frame.scope = scope
    frame.block(node.finalbody)


def match_(frame: Frame, node: ast.Match) -> None:
    frame.expr(node.subject)
    branches(frame, *[case.body for case in node.cases], [])


def return_(frame: Frame, node: ast.Return) -> None:
    value = frame.expr(node.value) if node.value is not None else constant(None)
    frame.returned.append(value)
    frame.tell(Returned(frame.at(node), (), value, frame.scope))
    frame.gone = True


def leave(frame: Frame, node: ast.stmt) -> None:
    if isinstance(node, ast.Raise) and node.exc is not None:
        frame.expr(node.exc)
    frame.gone = True


def assign_(frame: Frame, node: ast.Assign) -> None:
    match node.targets:
        case [ast.Tuple(elts=[_, ast.Name(id="_" | "__")])]:
            frame.ranked = node.value
    value = frame.expr(node.value)
    for target in node.targets:
        frame.assign(target, value)


def ann_assign(frame: Frame, node: ast.AnnAssign) -> None:
    if node.value is not None:
        frame.assign(node.target, frame.expr(node.value))


def aug_assign(frame: Frame, node: ast.AugAssign) -> None:
    old = frame.expr(node.target)
    value = frame.binary(
        BINARY[type(node.op)], old, frame.expr(node.value), node, in_place=True, state=outlives(frame, node.target)
    )
    frame.assign(node.target, value)


def expression(frame: Frame, node: ast.Expr) -> None:
    value = frame.expr(node.value)
    # An op in place changes what the variable holds.
    call = node.value
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.attr.endswith("_")
        and not call.func.attr.startswith("_")
        and value.op not in ("unknown", "constant")
    ):
        frame.names[call.func.value.id] = value


def def_(frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    for decorator in node.decorator_list:
        if frame.depth == 0 and frame.top:
            frame.expr(decorator)
    function = Function(node, frame.source, frame.inside)
    frame.names[node.name] = frame.flow.defined(function, frame.quiet or frame.top, frame.at(node))
    if frame.source is frame.flow.source and frame.top:
        definitions.op(frame, node)
        frame.flow.functions.append(function)


def class_(frame: Frame, node: ast.ClassDef) -> None:
    bases = tuple(frame.expr(base) for base in node.bases)
    cls = Class(node, frame.source, bases)
    frame.names[node.name] = Value("class", at=frame.at(node), name=node.name, ref=cls)
    inner = frame.nested()
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = Function(statement, frame.source, frame.inside, cls)
            if statement.name not in cls.methods or not is_property_setter(statement):
                cls.methods[statement.name] = function
            inner.names[statement.name] = Value("function", name=statement.name, ref=function)
        else:
            inner.block([statement])
    cls.attributes.update({name: value for name, value in inner.names.items() if value.op != "function"})
    if frame.source is frame.flow.source:
        definitions.function(frame, cls)
        frame.flow.classes.append(cls)


def import_(frame: Frame, node: ast.Import) -> None:
    for alias in node.names:
        if alias.asname:
            frame.names[alias.asname] = frame.flow.import_name(frame.source, alias.name, 0, None)
        else:
            top = alias.name.partition(".")[0]
            frame.names[top] = frame.flow.import_name(frame.source, top, 0, None)


def import_from(frame: Frame, node: ast.ImportFrom) -> None:
    for alias in node.names:
        if alias.name != "*":
            value = frame.flow.import_name(frame.source, node.module or "", node.level, alias.name)
            frame.names[alias.asname or alias.name] = value
            continue
        for name, full in frame.flow.star(frame.source, node).items():
            frame.names[name] = Value("external", name=full)
        for name in frame.flow.exported(frame.source, node):
            frame.names[name] = frame.flow.import_name(frame.source, node.module or "", node.level, name)
        for name, full in USUAL.items():  # of a star import that is not known nothing else is
            frame.names.setdefault(name, Value("external", name=full))


STATEMENTS: dict[type[ast.stmt], Callable[[Any, Any], None]] = {
    ast.Expr: expression, ast.Assign: assign_, ast.AnnAssign: ann_assign, ast.AugAssign: aug_assign,
    ast.If: if_, ast.For: for_, ast.AsyncFor: for_, ast.While: while_, ast.With: with_,
    ast.AsyncWith: with_, ast.Try: try_, ast.Match: match_, ast.Return: return_, ast.Raise: leave,
    ast.Break: leave, ast.Continue: leave, ast.FunctionDef: def_, ast.AsyncFunctionDef: def_,
    ast.Assert: assert_, ast.ClassDef: class_, ast.Import: import_, ast.ImportFrom: import_from,
}  # fmt: skip
if hasattr(ast, "TryStar"):
    STATEMENTS[ast.TryStar] = try_
