"""JAX programs: sums and parameters that are half, followed through the names of one function at a time.

What was measured with jax 0.10.2 on a CPU: a product of bf16 operands (``einsum``, ``dot_general``) accumulates in fp32 and rounds once, as
``sum`` and ``cumsum`` do, so by itself it is sound; ``.at[].add``, ``segment_sum``, ``scan`` and loops add in the dtype of their sum, and 4096
ones give 256. ``optax.apply_updates`` adds in fp32 where the update is, and rounds to the parameter's dtype.
"""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from precisionlint.events import Event
from precisionlint.facts import HalfParams, HalfSum, RoundedProduct
from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.source.parsing import walk
from precisionlint.subjects import File
from precisionlint.subjects.jax_sums import FOLDS, TREE_MAPS, added_to, is_at, named, parts_of
from precisionlint.subjects.names import Names, argument, last_name

CREATORS = {
    "zeros": 1,
    "ones": 1,
    "empty": 1,
    "full": 2,
    "zeros_like": 1,
    "ones_like": 1,
    "full_like": 2,
    "asarray": 1,
    "array": 1,
}
"""Functions of ``jax.numpy`` that make arrays -> the position of their dtype."""
NEUTRAL = ("zeros", "zeros_like", "empty", "full", "full_like")
PRODUCTS = ("einsum", "matmul", "dot", "tensordot", "dot_general", "vdot")
WIDENING = ("softmax", "log_softmax", "logsumexp", "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels")
HALF_NAMED = regex(r"bf16|bfloat16|fp16|float16")
LOOPS: dict[str, tuple[tuple[str, int], tuple[str, int], int, bool]] = {
    "scan": (("f", 0), ("init", 1), 0, True),
    "fori_loop": (("body_fun", 2), ("init_val", 3), 1, False),
}
"""Loops of jax's -> how they take their body and what it begins with, which parameter of the body is what it carries, and whether it gives
that in a pair."""
KEEPS = regex(r"\.astype\(\w+\.dtype\)|jnp\.b?float16")
"""How a body keeps the dtype of what it carries."""
FEW = 4
"""A sum of fewer terms is rounded at most twice."""


class Made(Struct, frozen=True):
    """What a name holds: ``kind`` ``"array"``, ``"sum"`` (a half array that begins empty), ``"product"``, ``"module"``, ``"params"`` or
    ``"optimizer"``; ``dtype`` a half where that is known; ``at`` where it took that dtype; ``text`` how, or what op."""

    kind: str
    dtype: str
    at: Place
    text: str = ""
    rate: float | None = None


def read(file: File) -> Iterator[Event]:
    """The facts of a file, function by function.

    Raises: UnreadableError.
    """
    names = Names(file)
    if not names.has("jax", "flax", "optax", "equinox", "jmp", "haiku"):
        return
    program = Program(file, names)
    seen: set[Any] = set()
    for fact in program.facts():
        if (type(fact), fact.at) not in seen:
            seen.add((type(fact), fact.at))
            yield fact


class Program:
    """One file."""

    def __init__(self, file: File, names: Names) -> None:
        self.file = file
        self.names = names

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        """The functions of the file by name, however deep; a name that stands for several stands for none."""
        found: dict[str, Any] = {}
        for node in self.file.functions:
            found[node.name] = None if node.name in found else node
        return {name: node for name, node in found.items() if node is not None}

    def facts(self) -> Iterator[Event]:
        module = Scope(self, {})
        yield from module.block(self.file.syntax.body)
        anywhere = any(made is not None and made.dtype for made in module.held.values())
        for node in self.file.functions:
            if anywhere or self.concerns_half(node):
                yield from Scope(self, dict(module.held)).function(node)

    @cached_property
    def half_lines(self) -> list[int]:
        """The lines that name a half dtype, or a function of this file that does."""
        lines = list(enumerate(self.file.lines, 1))
        direct = [number for number, line in lines if HALF_NAMED.search(line)]
        names = [re.escape(name) for name, node in self.functions.items() if _within(direct, node)]
        if not names:
            return direct
        words = re.compile(rf"\b(?:{'|'.join(names)})\b")
        return sorted({*direct, *(number for number, line in lines if words.search(line))})

    def concerns_half(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        """Whether a function can have to do with half precision: all others are passed over."""
        return _within(self.half_lines, node)

    def text_of(self, node: ast.expr, inner: Mapping[str, ast.FunctionDef]) -> str:
        """What a function that is handed on does, in the program's words."""
        own = inner.get(node.id) or self.functions.get(node.id) if isinstance(node, ast.Name) else None
        return ast.unparse(own or node)

    def half(self, node: ast.expr | None) -> str:
        """The half dtype that an expression names, or nothing."""
        if node is None:
            return ""
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else self.names.of(node)
        return HALVES.get(text.removeprefix("jax.numpy.").removeprefix("numpy.").removeprefix("ml_dtypes."), "")

    def empty(self, node: ast.expr) -> bool:
        """Whether an expression makes an array that holds nothing yet."""
        return isinstance(node, ast.Call) and self.names.of(node.func) in {f"jax.numpy.{each}" for each in NEUTRAL}

    def op(self, call: ast.Call) -> str:
        """The last part of a function of jax's, or nothing."""
        name = self.names.of(call.func)
        package, _, last = name.rpartition(".")
        return last if package.partition(".")[0] in ("jax", "optax", "flax") else ""


class Scope:
    """The names of one function, read from its top to its end; branches in the order in which they stand."""

    def __init__(self, program: Program, held: dict[str, Made | None]) -> None:
        self.program = program
        self.held = held
        self.loops: list[int | None] = []
        """How often each loop around runs, where that is known."""
        self.inner: dict[str, ast.FunctionDef] = {}
        """The functions that are defined in this one."""
        self.tuples: dict[str, ast.Tuple] = {}
        """What names were bound to last that stand for several values."""

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Event]:
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self.held.pop(each.arg, None)
        self.inner = {each.name: each for each in walk(node) if isinstance(each, ast.FunctionDef) and each is not node}
        yield from self.block(node.body)

    def block(self, body: list[ast.stmt]) -> Iterator[Event]:
        for statement in body:
            yield from self.statement(statement)

    def statement(self, node: ast.stmt) -> Iterator[Event]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
            return
        for part in _own_expressions(node):
            yield from self.expression(part)
        if isinstance(node, ast.Assign):
            yield from self.growing(node, node.targets[0], node.value)
            for target in node.targets:
                self.bind(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.bind(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield from self.grown(node.target, node, node.value)
        loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        if isinstance(node, (ast.For, ast.AsyncFor)) and isinstance(node.target, ast.Name):
            of = self.made(node.iter)
            self.held[node.target.id] = of if of is not None and of.kind == "array" else None
        if loop:
            self.loops.append(_times(node))
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from self.block(inner)
        for handler in getattr(node, "handlers", ()):
            yield from self.block(handler.body)
        if loop:
            self.loops.pop()

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            made = self.made(value)
            for position, each in enumerate(target.elts):
                if len(values) == len(target.elts):
                    self.bind(each, values[position])
                elif isinstance(each, ast.Name):
                    self.held[each.id] = made if made is not None and made.kind == "params" and position == 0 else None
        elif isinstance(target, ast.Name):
            self.held[target.id] = self.made(value)
            self.tuples.pop(target.id, None)
            if isinstance(value, ast.Tuple):
                self.tuples[target.id] = value

    def made(self, node: ast.expr) -> Made | None:
        """What an expression gives, as far as it is known to be half."""
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        if isinstance(node, ast.Subscript):
            of = self.made(node.value)
            return of if of is not None and of.kind in ("params", "array") else None
        if isinstance(node, ast.Call):
            return self.called(node)
        return None

    def called(self, call: ast.Call) -> Made | None:
        program, at = self.program, self.program.file.place(call)
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "astype":
            dtype, empty = program.half(argument(call, "dtype", 0)), program.empty(function.value)
            return Made("sum" if empty else "array", dtype, at, "cast") if dtype else None
        name, op = program.names.of(function), program.op(call)
        if name.startswith("jax.numpy.") and op in CREATORS:
            dtype = program.half(argument(call, "dtype", CREATORS[op]))
            return Made("sum" if op in NEUTRAL else "array", dtype, at, op) if dtype else None
        if op in PRODUCTS:
            return self.product(call, op)
        if name in TREE_MAPS and call.args and (dtype := self.emptied(call.args[0])):
            return Made("sum", dtype, at, "zeros for each leaf")
        if name in TREE_MAPS and call.args:
            dtype = self.casts(call.args[0])
            return Made("params", dtype, at, f"cast to {dtype}") if dtype else None
        if name.startswith("optax.") and not op.startswith(
            ("apply", "global", "softmax", "sigmoid", "l2", "losses", "cosine", "huber")
        ):
            return Made("optimizer", "", at, name, _rate(call))
        policy = self.policy(name, call)
        if policy is not None:
            return policy
        if dtype := program.half(argument(call, "param_dtype")):
            keyword = next(each for each in call.keywords if each.arg == "param_dtype")
            return Made("module", dtype, program.file.place(keyword.value), f"param_dtype={ast.unparse(keyword.value)}")
        if isinstance(function, ast.Attribute) and function.attr in (
            "init",
            "init_with_output",
            "lazy_init",
            "cast_to_param",
        ):
            of = self.made(function.value)
            return replace(of, kind="params") if of is not None and of.kind == "module" else None
        return None

    def policy(self, name: str, call: ast.Call) -> Made | None:
        """A policy of jmp's whose parameters are half."""
        at = self.program.file.place(call)
        said = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if name != "jmp.get_policy" or not isinstance(said, str):
            return None
        words = dict(word.strip().partition("=")[::2] for word in said.split(","))
        dtype = HALVES.get(words.get("params", words.get("p", said)).strip(), "")
        return Made("module", dtype, at, f'get_policy("{said}")') if dtype else None

    def product(self, call: ast.Call, op: str) -> Made | None:
        """A product of operands that are all half, in the dtype of these: nothing says otherwise."""
        if any(keyword.arg in ("precision", "out_type") or keyword.arg is None for keyword in call.keywords):
            return None
        if (preferred := argument(call, "preferred_element_type")) is not None:
            dtype = self.program.half(preferred)
            return Made("array", dtype, self.program.file.place(preferred), op) if dtype else None
        operands = [arg for arg in call.args if not isinstance(arg, ast.Constant)][: 8 if op == "einsum" else 2]
        made = [self.made(operand) for operand in operands]
        if len(made) < 2 or any(each is None or each.kind not in ("array", "params") for each in made):
            return None
        dtypes = {each.dtype for each in made if each is not None}
        return Made("product", dtypes.pop(), self.program.file.place(call), op) if len(dtypes) == 1 else None

    def emptied(self, function: ast.expr) -> str:
        """The half in which a function makes zeros for what it is given: ``lambda x: jnp.zeros_like(x, dtype=jnp.bfloat16)``."""
        if isinstance(function, ast.Call) and self.program.names.of(function.func) == "functools.partial":
            creates = bool(function.args) and self.program.names.of(function.args[0]) == "jax.numpy.zeros_like"
            return self.program.half(argument(function, "dtype", 2)) if creates else ""
        made = self.made(function.body) if isinstance(function, ast.Lambda) else None
        return made.dtype if made is not None and made.kind == "sum" else ""

    def casts(self, function: ast.expr) -> str:
        """The half to which a function casts what it is given: ``lambda x: x.astype(jnp.bfloat16)``, with or without a condition."""
        body: ast.expr | None = None
        if isinstance(function, ast.Lambda):
            body = function.body
        elif isinstance(function, ast.Name) and function.id in self.program.functions:
            returned = [
                n
                for n in walk(self.program.functions[function.id])
                if isinstance(n, ast.Return) and n.value is not None
            ]
            body = returned[0].value if returned else None
        if isinstance(body, ast.IfExp):
            body = body.body
        if isinstance(body, ast.Call) and isinstance(body.func, ast.Attribute) and body.func.attr == "astype":
            return self.program.half(argument(body, "dtype", 0))
        return ""

    def growing(self, node: ast.Assign, target: ast.expr, value: ast.expr) -> Iterator[Event]:
        """``total = total + x``"""
        if isinstance(target, ast.Name) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            for own, other in ((value.left, value.right), (value.right, value.left)):
                if isinstance(own, ast.Name) and own.id == target.id:
                    yield from self.grown(target, node, other)

    def grown(self, target: ast.expr, node: ast.stmt, added: ast.expr) -> Iterator[Event]:
        """A name to which something is added in a loop: a constant, which is weakly typed, or something half; fp32 would widen it."""
        made = self.held.get(target.id) if isinstance(target, ast.Name) else None
        if not isinstance(target, ast.Name) or made is None or made.kind != "sum" or not self.many():
            return
        of = self.made(added)
        if isinstance(added, ast.Constant) or (of is not None and of.dtype == made.dtype):
            yield HalfSum(self.program.file.place(node), (), "loop", target.id, made.dtype, made.at)

    def many(self) -> bool:
        """Whether a loop around runs often, as far as is known."""
        times = 1
        for each in self.loops:
            if each is None:
                return True
            times *= each
        return times >= FEW

    def expression(self, node: ast.expr) -> Iterator[Event]:
        for each in walk(node):
            if isinstance(each, ast.Call):
                yield from self.call(each)

    def call(self, call: ast.Call) -> Iterator[Event]:
        program = self.program
        op, at = program.op(call), program.file.place(call)
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "add" and is_at(function.value):
            array = function.value.value.value  # type: ignore[attr-defined]
            made = self.made(array)
            if made is not None and made.kind == "sum":
                yield HalfSum(at, (), "scatter", ast.unparse(array), made.dtype, made.at)
        elif op == "segment_sum" and call.args:
            made = self.made(call.args[0])
            if made is not None and made.kind == "array":
                yield HalfSum(at, (), "scatter", "segment_sum", made.dtype, made.at)
        elif op in LOOPS:
            yield from self.carried(call, *LOOPS[op])
        elif not op and last_name(function) in FOLDS:
            body, init = FOLDS[last_name(function)]
            for fact in self.carried(call, ("", body), ("init", init), 0):
                if KEEPS.search(
                    self.program.text_of(call.args[0], self.inner)
                ):  # else what is added may be fp32, and widen it
                    yield replace(fact, how="fold")
        elif op == "pallas_call":
            yield from self.kernel(call)
        elif isinstance(function, ast.Attribute) and function.attr == "astype":
            if program.names.of(call.args[0] if call.args else function).endswith("float32"):
                yield from self.widened(function.value, "float32", at)
        elif op in WIDENING and call.args:
            yield from self.widened(call.args[0], op, at)
        else:
            yield from self.trained(call, op, at)

    def widened(self, node: ast.expr, into: str, at: Place) -> Iterator[Event]:
        made = self.made(node)
        if made is not None and made.kind == "product":
            yield RoundedProduct(made.at, (), made.text, made.dtype, into, at)

    def carried(
        self, call: ast.Call, at_body: tuple[str, int], at_init: tuple[str, int], position: int, scan: bool = False
    ) -> Iterator[HalfSum]:
        """``scan(body, init, xs)``, ``fori_loop(low, high, body, init)`` and folds whose body adds to a half part of what it carries."""
        body, init = argument(call, *at_body), argument(call, *at_init)
        init = self.tuples.get(init.id, init) if isinstance(init, ast.Name) else init
        function = (
            body
            if isinstance(body, ast.Lambda)
            else self.inner.get(body.id) or self.program.functions.get(body.id)
            if isinstance(body, ast.Name)
            else None
        )
        if function is None or init is None:
            return
        parameters = function.args.args
        if len(parameters) <= position:
            return
        carried = parts_of(function, parameters[position].arg)
        inits = init.elts if isinstance(init, ast.Tuple) else [init]
        adders = {**self.program.functions, **self.inner}
        for index, (name, part) in enumerate(zip(carried if len(carried) == len(inits) else [], inits, strict=False)):
            made = self.made(part)
            part_of = index if len(carried) > 1 else None
            added = added_to(function, name, part_of, scan, self.program.names, adders)
            if made is not None and made.kind == "sum" and added is not None:
                yield HalfSum(self.program.file.place(added), (), "loop", name, made.dtype, made.at)

    def kernel(self, call: ast.Call) -> Iterator[Event]:
        """A Pallas kernel that adds products to a block of its half result, or of a half scratch."""
        first = call.args[0] if call.args else argument(call, "kernel")
        if isinstance(first, ast.Call) and self.program.names.of(first.func) == "functools.partial" and first.args:
            first = first.args[0]
        function = self.program.functions.get(first.id) if isinstance(first, ast.Name) else None
        if function is None:
            return
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        scratch = argument(call, "scratch_shapes")
        scratches = scratch.elts if isinstance(scratch, (ast.List, ast.Tuple)) else []
        out = argument(call, "out_shape", 1)
        outs = out.elts if isinstance(out, (ast.List, ast.Tuple)) else [out] if out is not None else []
        if (scratch is not None and not scratches) or len(parameters) < len(outs) + len(scratches):
            return
        blocks = parameters[len(parameters) - len(outs) - len(scratches) :]
        for name, shape in zip(blocks, [*outs, *scratches], strict=True):
            block = shape if isinstance(shape, ast.Call) else None
            dtype = self.program.half(argument(block, "dtype", 1)) if block is not None else ""
            for node in walk(function) if dtype else ():
                if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and named(node.target) == name:
                    yield HalfSum(
                        self.program.file.place(node), (), "kernel", name, dtype, self.program.file.place(block or call)
                    )

    def trained(self, call: ast.Call, op: str, at: Place) -> Iterator[Event]:
        """An optimizer takes parameters that are half."""
        program, function = self.program, call.func
        name = program.names.of(function)
        optimizer: Made | None = None
        taken: ast.expr | None = None
        if isinstance(function, ast.Attribute) and function.attr == "init" and call.args:
            optimizer, taken = self.made(function.value), call.args[0]
        elif name.endswith("TrainState.create"):
            tx = argument(call, "tx")
            optimizer, taken = self.made(tx) if tx is not None else None, argument(call, "params")
        elif name in ("flax.nnx.Optimizer", "flax.nnx.ModelAndOptimizer") and len(call.args) > 1:
            optimizer, taken = self.made(call.args[1]), call.args[0]
        if optimizer is None or optimizer.kind != "optimizer" or taken is None:
            return
        if isinstance(taken, ast.Call) and taken.args and program.names.of(taken.func).startswith("equinox."):
            taken = taken.args[0]
        made = self.made(taken)
        if made is not None and made.kind in ("params", "module"):
            by = "" if op else name
            yield HalfParams(made.at, (), made.dtype, made.text, optimizer.text, optimizer.rate, by, at, True)


def _within(lines: list[int], node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether one of these lines, in order, is one of the function's."""
    first = bisect.bisect_left(lines, node.lineno)
    return first < len(lines) and lines[first] <= (node.end_lineno or node.lineno)


def _own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, without those of the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, (ast.withitem, ast.keyword)):
            yield from (each for each in ast.iter_child_nodes(child) if isinstance(each, ast.expr))


def _times(node: ast.stmt) -> int | None:
    """How often a loop over ``range(4)`` runs; None where that is not written down."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name):
        bounds = [
            each.value for each in node.iter.args if isinstance(each, ast.Constant) and isinstance(each.value, int)
        ]
        if node.iter.func.id == "range" and len(bounds) == len(node.iter.args) and bounds:
            return len(range(*bounds))
    return None


def _rate(call: ast.Call) -> float | None:
    """The learning rate of a call of optax's, or of the last one in a chain that has one."""
    rate = argument(call, "learning_rate", 0)
    if isinstance(rate, ast.Constant) and isinstance(rate.value, (int, float)):
        return float(rate.value)
    inner = [_rate(each) for each in call.args if isinstance(each, ast.Call)]
    return next((each for each in reversed(inner) if each is not None), None)
