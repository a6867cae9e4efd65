"""Triton kernels as text: what they accumulate in, what they add up in half, and how they scale into FP8.

Functions under ``triton.jit`` are read, and the helpers that they call, each call with what is known of its arguments. A value's dtype is
known where the kernel says it (a cast, ``tl.zeros(..., dtype)``), or where the file itself launches the kernel with it; anything else is
unknown, and nothing is said of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from precisionlint.events import Event
from precisionlint.findings import Place
from precisionlint.kernel_facts import FOLLOWS, FP8, HALVES, Accumulated, Dotted, Reduced, ScaledByAmax, Typed
from precisionlint.patterns import regex
from precisionlint.source.parsing import walk
from precisionlint.subjects import File
from precisionlint.subjects.names import last_name
from precisionlint.subjects.triton_launches import NOTHING, Reaching, reaching
from precisionlint.subjects.triton_values import (
    DTYPES,
    FP8_MAXIMA,
    FP8_MAXIMUM,
    UNKNOWN,
    Value,
    applied,
    constant,
    fixed,
    folded,
    joined,
    promoted,
    rank,
)

NOT_FOLLOWING = regex(
    r"warn|flag|err|mean|std|var|lse|delta|max|sum|scale|norm|inv|stat|acc|part|tmp|buf|ws|work|lock|count|idx|ind|len|seq|mask|pos|off|num|label|target|split|start|end|cu_|rank|"
    r"expert|id(?:s|_|$)|size|freq|cos|sin|loss|prob|score_bias|beta|decay|gate|state|hist|lut|table|(?:^|_)a?dt(?:_|$)|(?:^|_)[mldLMDg](?:_|$)",
    re.IGNORECASE,
)
"""Pointers whose numbers are fp32 or integers whatever the caller's tensors are, by their names."""
PARTIAL = regex(r"acc|part|tmp|buf|(?:^|_)ws|work|sum|mean|var", re.IGNORECASE)
INTEGERS = regex(
    r"warn|flag|err|lock|count|idx|ind(?:ex|ic)|start|seqlen|"
    r"(?:^|_)(?:cu|num|n|len|lens|lengths?|mask|pos|offs?|offsets?|labels?|targets?|splits?|ends?|ranks?|experts?|ids?|sizes?)(?:_|$)",
    re.IGNORECASE,
)
"""Of these, the ones that hold sums of the tensors' numbers, and those that hold none: where the file itself makes the first in the dtype
of a tensor, it is that and not fp32."""
AWARE = regex(
    r"\.to\((?:tl|triton\.language)\.float32\)|\.to\(\w+\.dtype\)|type\.element_ty|\bdtype\s*=\s*\w+\.dtype\b|bfloat16|float16|\bhalf\b|autocast|custom_fwd"
    r"|dtype\w*\s*:\s*(?:\w+\.)*constexpr"
)
"""What a file holds whose kernels are written for half precision as well."""
ADDING = frozenset({"sum", "cumsum"})
WIDE = frozenset({"fp32", "fp64"})
SUMS = HALVES | {"fp32", "fp64", FOLLOWS}
DEPTH = 6
"""How many helpers deep a kernel is followed."""


class _Loop(Struct, frozen=True):
    """The names that stood before a loop, with their values then, and where each was bound."""

    before: Mapping[str, Value]
    bound: Mapping[str, Place]


def read(file: File) -> Iterator[Event]:
    """The facts of a file's kernels, in its order.

    Raises: UnreadableError.
    """
    functions = {
        node.name: node for node in file.every(ast.FunctionDef) if any(_jits(each) for each in node.decorator_list)
    }
    if not functions:
        return
    constants = _constants(file)
    given, launched = reaching(file, functions)
    aware = bool(AWARE.search(file.text))
    seen: set[tuple[Place, Event]] = set()
    helpers = {name for node in functions.values() for name in _called(node) if name in functions}
    for name, node in functions.items():
        if name in helpers and not given[name]:
            continue  # it is read where it is called, with what is known there
        kernel = _Kernel(file, functions, constants, given[name] if name in launched else None)
        kernel.run(node)
        for fact in kernel.facts:
            if isinstance(fact, (Accumulated, Reduced)) and fact.dtype.dtype == FOLLOWS and not aware:
                continue
            if (fact.at, fact) not in seen:  # a helper is read once a call
                seen.add((fact.at, fact))
                yield fact


class _Kernel:
    """One kernel and the helpers that it calls."""

    def __init__(
        self,
        file: File,
        functions: Mapping[str, ast.FunctionDef],
        constants: Mapping[str, Value],
        launched: Mapping[str, Reaching] | None,
    ) -> None:
        """``launched``: the dtypes that the file's launches bring; None where another file launches the kernel."""
        self.file = file
        self.functions = functions
        self.constants = constants
        self.launched = launched
        self.facts: list[Event] = []
        self.depth = 0

    def run(self, node: ast.FunctionDef) -> None:
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        scope = {each.arg: Value(pointers=frozenset({each.arg})) for each in parameters}
        for each in parameters:
            if each.annotation is not None and "constexpr" in ast.unparse(each.annotation):
                chosen = self.launched is not None and bool(self.launched.get(each.arg))  # by a launch of the file
                dtypes = self.element(each.arg) if chosen or "type" in each.arg.lower() else NOTHING
                scope[each.arg] = Value(dtypes, fp8=bool(FP8_MAXIMUM.search(each.arg)))
        _Body(self, {}).block(node.body, scope)

    def elements(self, pointers: frozenset[str], asked: bool = False) -> Reaching:
        """The dtypes of what an address points to, whichever of these it is in; nothing where one of them is not known."""
        each = [self.element(pointer, asked) for pointer in pointers]
        return frozenset().union(*each) if all(each) else NOTHING

    def element(self, pointer: str, asked: bool = False) -> Reaching:
        """The dtypes of what a pointer points to. What follows the caller's tensor does so for its numbers, not for statistics of them
        that are kept in fp32 by custom, nor for indices, unless the kernel itself asks for it (``asked``)."""
        elsewhere = frozenset({Typed(FOLLOWS, False, handed=False)})
        found = self.launched.get(pointer, NOTHING) if self.launched is not None else elsewhere
        if NOT_FOLLOWING.search(pointer):
            sums = PARTIAL.search(pointer) is not None
            numbers = not INTEGERS.search(pointer)
            kept = (
                each
                for each in found
                if each.dtype != FOLLOWS or (numbers and (asked or (sums and each.at is not None)))
            )
            found = frozenset(replace(each, handed=False) if each.dtype == FOLLOWS else each for each in kept)
        return frozenset(replace(each, of=frozenset({pointer})) if each.dtype == FOLLOWS else each for each in found)


class _Body:
    """The statements of one function, in their order. Branches are joined, loops are walked once with what stood before them."""

    def __init__(self, kernel: _Kernel, bound: dict[str, Place]) -> None:
        self.kernel = kernel
        self.file = kernel.file
        self.bound = bound
        self.loops: list[_Loop] = []
        self.target = ""
        self.lifted: frozenset[str] = frozenset()
        self.returned: list[Value] = []

    def block(self, body: Sequence[ast.stmt], scope: dict[str, Value]) -> None:
        if not self.lifted:
            self.lifted = frozenset(_lifted(body))
        for statement in body:
            self.target = _named(statement)
            self.statement(statement, scope)

    def statement(self, node: ast.stmt, scope: dict[str, Value]) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self.assign(targets, node.value, scope)
        elif isinstance(node, ast.AugAssign):
            self.augment(node, scope)
        elif isinstance(node, ast.If):
            self.branch(node, scope)
        elif isinstance(node, (ast.For, ast.While)):
            self.loop(node, scope)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned.append(self.value(node.value, scope))
        elif isinstance(node, ast.Expr):
            self.value(node.value, scope)

    def assign(self, targets: Sequence[ast.expr], expression: ast.expr, scope: dict[str, Value]) -> None:
        value = self.value(expression, scope)
        for target in targets:
            if isinstance(target, ast.Name):
                if self.adds_to(target.id, expression):
                    if not value.dtypes:  # a loop hands on one dtype: what is added has it, or becomes it
                        value = replace(scope.get(target.id, UNKNOWN), amax=None)
                    self.accumulated(target.id, expression, value, scope)
                scope[target.id] = value
                self.bound[target.id] = self.file.place(expression)
            elif isinstance(target, ast.Tuple):
                parts = expression.elts if isinstance(expression, ast.Tuple) else []
                for index, each in enumerate(target.elts):
                    if isinstance(each, ast.Name):
                        same = len(parts) == len(target.elts)
                        scope[each.id] = self.value(parts[index], scope) if same else UNKNOWN
                        self.bound[each.id] = self.file.place(expression)

    def adds_to(self, name: str, node: ast.expr) -> bool:
        """Whether an expression is the old value of a name plus something."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            return any(isinstance(each, ast.Name) and each.id == name for each in (node.left, node.right))
        if isinstance(node, ast.Call) and _api(node) in ("dot", "fma", "dot_scaled"):
            given = [*node.args[2:], *(each.value for each in node.keywords if each.arg == "acc")]
            return any(isinstance(each, ast.Name) and each.id == name for each in given)
        return False

    def augment(self, node: ast.AugAssign, scope: dict[str, Value]) -> None:
        added = self.value(node.value, scope)
        if not isinstance(node.target, ast.Name):
            return
        name = node.target.id
        old = scope.get(name, UNKNOWN)
        if isinstance(node.op, (ast.Add, ast.Sub)):
            result = promoted(old, added) if added.dtypes else replace(old, amax=None)
            self.accumulated(name, node, result, scope, added=node.value)
            if added.number and added.number > 0 and old.amax is not None:
                result = replace(old, floored=True)
        else:
            result = self.arithmetic(node.op, old, added, node)
        scope[name] = result

    def accumulated(
        self,
        name: str,
        node: ast.expr | ast.stmt,
        result: Value,
        scope: Mapping[str, Value],
        added: ast.expr | None = None,
    ) -> None:
        """Tells of a sum that the loop around it hands on in the dtype that it was made with."""
        if not self.loops or name not in self.loops[-1].before:
            return
        loop = self.loops[-1]
        before = loop.before[name]
        words = {each.dtype for each in result.dtypes}
        kept = before.dtypes if FOLLOWS in words else frozenset(each for each in before.dtypes if each.dtype in words)
        dtype = replace(before, dtypes=kept).one_of(SUMS)
        if before.pointers or dtype is None:
            return
        inside = [each for part in ([added] if added is not None else [node]) for each in walk(part)]
        by_dot = any(isinstance(each, ast.Call) and _api(each) == "dot" for each in inside)
        made = loop.bound.get(name, self.file.place(node))
        self.tell(Accumulated(self.file.place(node), (), name, dtype, made, by_dot))

    def branch(self, node: ast.If, scope: dict[str, Value]) -> None:
        self.value(node.test, scope)
        tested = {each.id for each in walk(node.test) if isinstance(each, ast.Name)}
        for name in tested:
            if name in scope and scope[name].amax is not None:
                scope[name] = replace(scope[name], floored=True)  # the kernel looks at it: it knows of zeros
        then, other = dict(scope), dict(scope)
        self.block(node.body, then)
        self.block(node.orelse, other)
        for name in then.keys() | other.keys():
            scope[name] = joined(then.get(name, UNKNOWN), other.get(name, UNKNOWN))

    def loop(self, node: ast.For | ast.While, scope: dict[str, Value]) -> None:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            scope[node.target.id] = UNKNOWN
        before = dict(scope)
        self.loops.append(_Loop(before, dict(self.bound)))
        self.block(node.body, scope)
        self.loops.pop()
        for name, value in before.items():
            scope[name] = joined(scope[name], value) if scope[name] != value else value

    def value(self, node: ast.expr, scope: Mapping[str, Value]) -> Value:
        """What is known of an expression; what it does is told on the way."""
        if isinstance(node, ast.Constant):
            number = node.value
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                return UNKNOWN
            return Value(number=float(number), fp8=number in FP8_MAXIMA)
        if isinstance(node, ast.Name):
            return scope.get(node.id) or self.kernel.constants.get(node.id, UNKNOWN)
        if isinstance(node, ast.BinOp):
            return self.arithmetic(node.op, self.value(node.left, scope), self.value(node.right, scope), node)
        if isinstance(node, ast.UnaryOp):
            operand = self.value(node.operand, scope)
            number = -operand.number if operand.number is not None and isinstance(node.op, ast.USub) else operand.number
            return replace(operand, number=number)
        if isinstance(node, ast.Subscript):
            return self.value(node.value, scope)
        if isinstance(node, ast.IfExp):
            self.value(node.test, scope)
            return replace(joined(self.value(node.body, scope), self.value(node.orelse, scope)), floored=True)
        if isinstance(node, ast.Attribute):
            return self.attribute(node, scope)
        if isinstance(node, ast.Call):
            return self.call(node, scope)
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.Tuple)):
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    self.value(each, scope)
        return UNKNOWN

    def attribute(self, node: ast.Attribute, scope: Mapping[str, Value]) -> Value:
        """``tl.float16``, ``x.dtype``, ``pointer.dtype.element_ty``, ``x.T``."""
        if _library(node.value) and node.attr in DTYPES:
            return Value(frozenset({Typed(DTYPES[node.attr])}))
        if FP8_MAXIMUM.search(node.attr):
            return Value(fp8=True)
        owner = self.value(node.value, scope)
        if node.attr in ("dtype", "type", "element_ty"):
            dtypes = self.kernel.elements(owner.pointers, asked=True) if owner.pointers else owner.dtypes
            return Value(dtypes, pointers=owner.pointers if node.attr != "element_ty" else frozenset())
        return owner if node.attr == "T" else UNKNOWN

    def arithmetic(self, operator: ast.operator, left: Value, right: Value, node: ast.expr | ast.stmt) -> Value:
        if isinstance(operator, (ast.Add, ast.Sub)) and (left.pointers or right.pointers):
            return Value(pointers=left.pointers or right.pointers)
        nowhere = frozenset[str]()  # a factor is a number, not an address
        left, right = replace(left, pointers=nowhere), replace(right, pointers=nowhere)
        result = promoted(left, right)
        if fixed(left) and fixed(right):
            return Value(number=folded(operator, left.number, right.number), fp8=left.fp8 or right.fp8)
        if isinstance(operator, ast.Add):
            scaled = left if left.amax is not None else right
            other = right if scaled is left else left
            if scaled.amax is not None:
                return replace(scaled, floored=scaled.floored or other.amax is None, dtypes=result.dtypes)
        if isinstance(operator, (ast.Div, ast.Mult)):
            return self.scaled(operator, left, right, result, node)
        return result

    def scaled(
        self, operator: ast.operator, left: Value, right: Value, result: Value, node: ast.expr | ast.stmt
    ) -> Value:
        """A product or quotient: a scale that follows from an amax, or numbers brought into range by one."""
        divides = isinstance(operator, ast.Div)
        fp8 = left.fp8 or right.fp8
        made = self.file.place(node)
        if left.amax is not None and constant(right):
            return replace(left, fp8=fp8, dtypes=result.dtypes, scale=left.scale or made)
        if right.amax is not None and constant(left):
            made = right.scale or made
            return replace(right, fp8=fp8, dtypes=result.dtypes, inverse=right.inverse ^ divides, scale=made)
        scale = right if right.amax is not None else left if not divides else UNKNOWN
        if scale.amax is not None and scale.fp8 and (divides != scale.inverse):
            self.tell(ScaledByAmax(scale.scale or made, (), scale.amax, made, scale.floored, scale.inverse))
        return result

    def call(self, node: ast.Call, scope: Mapping[str, Value]) -> Value:
        api = _api(node)
        if isinstance(node.func, ast.Attribute) and not _library(node.func.value):
            return self.method(node, node.func, scope)
        if not api and isinstance(node.func, ast.Name):
            return self.helper(node, node.func.id, scope)
        values = [self.value(each, scope) for each in node.args]
        named = {each.arg: self.value(each.value, scope) for each in node.keywords if each.arg}
        first = values[0] if values else named.get("input", UNKNOWN)
        if api == "load":
            return Value(self.kernel.elements(first.pointers)) if first.pointers else UNKNOWN
        if api in ("make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous"):
            return first if api != "make_block_ptr" else named.get("base", first)
        if api in ("zeros", "full"):
            given = named.get("dtype") or (
                values[1 + (api == "full")] if len(values) > 1 + (api == "full") else UNKNOWN
            )
            fill = values[1] if api == "full" and len(values) > 1 else named.get("value", UNKNOWN)
            return Value(given.dtypes, number=0.0 if api == "zeros" else fill.number)
        if api in ("zeros_like", "full_like"):
            return Value(first.dtypes, number=0.0)
        if api == "dot":
            return self.dot(node, values, named, scope)
        if api == "atomic_add" and first.pointers:
            held = Value(self.kernel.elements(first.pointers)).one_of(SUMS)
            if held is not None:
                at = self.file.place(node)
                name = " or ".join(sorted(first.pointers))
                self.tell(Accumulated(at, (), name, held, at, by_dot=False, shared=True))
            return UNKNOWN
        if api in ADDING and first.dtypes:
            return self.reduction(node, api, first, named)
        return applied(api, values, named, self.file.place(node))

    def reduction(self, node: ast.Call, api: str, first: Value, named: Mapping[str, Value]) -> Value:
        if "dtype" in named:
            return Value(named["dtype"].dtypes)
        half = first.one_of(HALVES | {FOLLOWS})
        if half is not None:
            self.tell(Reduced(self.file.place(node), (), f"tl.{api}", half))
        return Value(first.dtypes)

    def dot(
        self, node: ast.Call, values: Sequence[Value], named: Mapping[str, Value], scope: Mapping[str, Value]
    ) -> Value:
        a, b = (*values, UNKNOWN, UNKNOWN)[:2]
        accumulator = node.args[2] if len(node.args) > 2 else None
        accumulator = next((each.value for each in node.keywords if each.arg == "acc"), accumulator)
        carried = ""
        if isinstance(accumulator, ast.Name) and self.loops and accumulator.id in self.loops[-1].before:
            carried = accumulator.id
        # Of the dtypes that launches bring, FP8 is the one of which most can be said.
        sides = [each.one_of(FP8) or min(each.dtypes, key=rank, default=None) for each in (a, b)]
        bounded = "max_num_imprecise_acc" in named or len(values) > 5
        precise = bool({"input_precision", "allow_tf32"} & named.keys()) or len(values) > 3
        out = named["out_dtype"].dtypes if "out_dtype" in named else frozenset()
        held = self.target in self.lifted or (bool(self.loops) and self.target in self.loops[-1].before)
        halved = self.target in scope and not scope[self.target].one_of(WIDE)  # told as a sum of the loop
        summed_in = (
            next(iter(out)) if len(out) == 1 and not (held and self.target not in self.lifted and halved) else None
        )
        lifted = held or not self.target
        self.tell(Dotted(self.file.place(node), (), sides[0], sides[1], carried, bounded, precise, summed_in, lifted))
        if "out_dtype" in named:
            return Value(named["out_dtype"].dtypes)
        given = self.value(accumulator, scope) if accumulator is not None else UNKNOWN
        if given.dtypes:
            return Value(given.dtypes)
        return Value(frozenset({Typed("fp32")})) if accumulator is None else UNKNOWN

    def method(self, node: ast.Call, function: ast.Attribute, scope: Mapping[str, Value]) -> Value:
        owner = self.value(function.value, scope)
        values = [self.value(each, scope) for each in node.args]
        if function.attr == "to" and (values or node.keywords):
            target = values[0] if values else self.value(node.keywords[0].value, scope)
            bits = any(each.arg == "bitcast" for each in node.keywords)
            wide = any(each.dtype in ("fp32", "fp64") for each in owner.dtypes)
            dtypes = frozenset(replace(each, narrowed=True) if wide else each for each in target.dtypes)
            return UNKNOWN if bits or owner.pointers else replace(owner, dtypes=dtypes)
        if function.attr == "load":
            return Value(self.kernel.elements(owner.pointers))
        if function.attr in ("sum", "cumsum") and owner.dtypes:
            return self.reduction(node, function.attr, owner, {})
        return applied(function.attr, [owner, *values], {}, self.file.place(node))

    def helper(self, node: ast.Call, name: str, scope: Mapping[str, Value]) -> Value:
        """A call of another jitted function of the file: its body, with what is known of the arguments."""
        values = [self.value(each, scope) for each in node.args]
        named = {each.arg: self.value(each.value, scope) for each in node.keywords if each.arg}
        function = self.kernel.functions.get(name)
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        if function is None or starred or self.kernel.depth >= DEPTH:
            return UNKNOWN
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        given = {**dict.fromkeys(parameters, UNKNOWN), **dict(zip(parameters, values, strict=False)), **named}
        body = _Body(self.kernel, dict.fromkeys(given, self.file.place(node)))
        self.kernel.depth += 1
        body.block(function.body, given)
        self.kernel.depth -= 1
        return body.returned[0] if len(body.returned) == 1 else UNKNOWN

    def tell(self, fact: Event) -> None:
        self.kernel.facts.append(fact)


def _named(statement: ast.stmt) -> str:
    """The variable that takes what a statement computes, where that is one."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        target = statement.target
    else:
        return ""
    direct = statement.value is not None and not (
        isinstance(statement.value, ast.Call) and last_name(statement.value.func) == "to"
    )
    return target.id if isinstance(target, ast.Name) and direct else ""


def _lifted(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The variables that are converted to fp32 somewhere: what was summed in half goes on in full."""
    for statement in body:
        for node in walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
                given = [*node.args, *(each.value for each in node.keywords)]
                if isinstance(node.func.value, ast.Name) and any(last_name(each) == "float32" for each in given):
                    yield node.func.value.id


def _constants(file: File) -> dict[str, Value]:
    """What the module's top level says of names: numbers, dtypes, maxima of FP8."""
    found = {}
    for node in file.syntax.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value
        if isinstance(value, ast.Call) and last_name(value.func) == "constexpr" and value.args:
            value = value.args[0]
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = _constant_of(target.id, value)
    return found


def _constant_of(name: str, node: ast.expr) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Value(number=float(node.value), fp8=node.value in FP8_MAXIMA)
    if isinstance(node, ast.Attribute) and _library(node.value) and node.attr in DTYPES:
        return Value(frozenset({Typed(DTYPES[node.attr])}))
    finite = "float8" in ast.unparse(node) and isinstance(node, ast.Attribute) and node.attr == "max"
    return Value(fp8=finite or bool(FP8_MAXIMUM.search(name)))


def _jits(decorator: ast.expr) -> bool:
    """``@triton.jit``, ``@jit``, and either with arguments."""
    return last_name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "jit"


def _called(node: ast.FunctionDef) -> Iterator[str]:
    for each in walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name):
            yield each.func.id


def _api(node: ast.Call) -> str:
    """The name of a function of ``tl``, or nothing."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) and _library(function.value) else ""


def _library(node: ast.expr) -> bool:
    """``tl``, ``triton.language``, ``tl.math``, ``libdevice``."""
    return last_name(node) in ("tl", "language", "math", "libdevice", "extra")
