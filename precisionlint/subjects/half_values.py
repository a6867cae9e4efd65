"""Torch tensors of one function by their dtype: which are half, which were computed in half, and what becomes of them.

It reads tests and other straight code: names are followed from the top of a function to its end, helpers are not entered. The result of
an unknown function of half tensors is taken to be half (and what depends on that is likely, not certain).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from precisionlint.events import Event
from precisionlint.facts import HeldTo, ToNumpy
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.source.parsing import walk
from precisionlint.subjects import File
from precisionlint.subjects.compared import (
    COMPUTING,
    GRADIENT,
    MOVING,
    Comparison,
    Difference,
    Tensor,
    called_by,
    innermost,
)
from precisionlint.subjects.names import Names, argument, last_name
from precisionlint.subjects.parametrized import Calls, Choices, Run, handed, numbers_of, runs

WIDE = ("float32", "float", "float64", "double")
LIKE = frozenset({"randn_like", "rand_like", "zeros_like", "ones_like", "empty_like", "full_like"})
CREATORS = LIKE | {"randn", "rand", "zeros", "ones", "empty", "full", "tensor", "linspace"}
KEEPING = frozenset(
    {
        "detach", "cpu", "cuda", "clone", "contiguous", "view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "expand",
        "requires_grad_", "t", "T", "mT", "data", "abs", "neg", "clamp", "relu", "to_local", "resolve_conj",
    }
)  # fmt: skip
"""Methods and attributes whose result has the dtype and the precision of the tensor."""
RESTORES = regex(r"load|save(?!d_tensors|_for_backward)|state_dict|checkpoint|copy\(")
"""What a test does whose two results are bitwise equal, whatever they are called."""
JUDGED = regex(r"allclose|assert_close|assertLess|\bnumpy\(|asarray\(|np\.array\(|\bassert\b.*<")
NAMED = regex(r"float16|half")
OTHER_DTYPE = ("dtype", "out_dtype", "output_dtype")
CLOSE = "torch.testing.assert_close"
CLOSER = ("assert_close", "allclose", "assertEqual")
"""And what a project calls its own that takes the same, ``TestCase.assertEqual`` of torch among them."""
DEFAULTS = {
    "torch.allclose": (1e-5, 1e-8),
    "numpy.allclose": (1e-5, 1e-8),
    "numpy.testing.assert_allclose": (1e-7, 0.0),
}
"""(rtol, atol) where they are not given; torch.testing.assert_close chooses by dtype, and asks for both or none."""


Value = Tensor | Difference | None


def read(file: File) -> Iterator[Event]:
    """The facts of a file, function by function.

    Raises: UnreadableError.
    """
    names = Names(file)
    if not names.has("torch"):
        return
    constants = {
        target.id: node.value
        for node in file.syntax.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = Calls(file)
    for node in file.functions:
        seen = set()
        text = "\n".join(file.lines[node.lineno - 1 : node.end_lineno])
        if not JUDGED.search(text):
            continue
        listed = runs(names, node, file.owners.get(node), constants)
        for run in listed if any(run.halves for run in listed) else handed(names, node, constants, calls) or listed:
            if run.halves or NAMED.search(text):
                for fact in Function(file, names, node, run, constants).facts():
                    if (type(fact), fact.at) not in seen:
                        seen.add((type(fact), fact.at))
                        yield fact


class Function:
    """One function in one of its runs; read twice, so that what a product says of its operands is known where they were handed on before."""

    def __init__(
        self,
        file: File,
        names: Names,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        run: Run,
        constants: Mapping[str, ast.expr],
    ) -> None:
        self.file = file
        self.names = names
        self.node = node
        self.held: dict[str, Value] = {}
        self.learnt: dict[str, Tensor] = {}
        self.choices = Choices(names, dict(run.halves), {**constants, **run.values}, numbers_of(names, node, constants))
        self.numbers: dict[str, float | None] = {}
        self.makers: dict[str, ast.Call] = {}
        self.ended = False
        self.restores = bool(RESTORES.search("\n".join(file.lines[node.lineno - 1 : node.end_lineno])))
        self.unsure = 0  # in how many blocks that this run may not enter

    def facts(self) -> Iterator[Event]:
        asked = self.asked()
        self.choices.halves = {name: dtype for name, dtype in self.choices.halves.items() if name not in asked}
        for _ in self.block(self.node.body):
            pass
        self.held, self.ended = dict(self.learnt), False
        yield from self.block(self.node.body)

    def asked(self) -> set[str]:
        """The names on which the function's branches depend in a way that is not followed: a test that asks for its dtype may treat each as
        it must be."""
        tests = [each.test for each in walk(self.node) if isinstance(each, (ast.If, ast.IfExp))]
        unknown = [test for test in tests if self.choices.decided(test) is None]
        return {name.id for test in unknown for name in walk(test) if isinstance(name, ast.Name)}

    def block(self, body: list[ast.stmt]) -> Iterator[Event]:
        for node in body:
            if self.ended:
                return
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(node, ast.If) and (decided := self.choices.decided(node.test)) is not None:
                yield from self.block(node.body if decided else node.orelse)
                self.ended = self.ended or any(map(_ends, node.body if decided else node.orelse))
                continue
            if isinstance(node, (ast.With, ast.AsyncWith)) and any(
                "raises" in ast.unparse(each.context_expr) for each in node.items
            ):
                continue
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    yield from self.judged(child)
            test = node.test if isinstance(node, ast.Assert) else None
            if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Lt, ast.LtE)):
                yield from self.bounded(test.left, test.comparators[0], test)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self.filled(node.value)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.bind(target, node.value)
            self.unsure += not isinstance(node, (ast.With, ast.AsyncWith))
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    yield from self.block(inner)
            self.unsure -= not isinstance(node, (ast.With, ast.AsyncWith))

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        value = self.choices.chosen(value)
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Dict):
                self.choices.written[target.id] = value
            self.held[target.id] = self.value(value)
            if self.names.of(value).startswith("torch."):  # dtype = torch.bfloat16
                self.choices.written[target.id] = value
            if isinstance(value, ast.Call):
                self.makers[target.id] = innermost(value)
            number = value.value if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) else None
            same = target.id not in self.numbers or self.numbers[target.id] == number
            self.numbers[target.id] = number if same or not self.unsure else None
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = (
                value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
            )
            if isinstance(value, (ast.ListComp, ast.GeneratorExp)):  # one of its kind for each
                values = [value.elt] * len(target.elts)
            of = self.value(value) if values is None else None
            for position, each in enumerate(target.elts):
                if values is not None:
                    self.bind(each, values[position])
                elif isinstance(each, ast.Name):
                    first = of if isinstance(of, Tensor) and of.guess and (position == 0 or not of.op) else None
                    self.held[each.id] = self.learnt.get(each.id) or first

    def filled(self, call: ast.Call) -> None:
        """What ``kernel[grid](x, out)`` and ``rms_norm(out, x)`` write: tensors whose memory holds nothing yet."""
        name = called_by(call.func)
        op = last_name(call.func.value if isinstance(call.func, ast.Subscript) else call.func) or name
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        held = [(each.id, of) for each in given if isinstance(each, ast.Name) and (of := self.held.get(each.id))]
        tensors = [of for _, of in held if isinstance(of, Tensor) and not of.blank]
        if not tensors or self.names.of(call.func).partition(".")[0] in ("torch", "numpy", "print"):
            return
        made = self.computed(op, tensors, call, guess=True)
        for name, of in held:
            if isinstance(of, Tensor) and of.blank:
                computed = made.computed if made is not None and of.dtype != "fp32" else ""
                self.held[name] = replace(of, op=op, computed=computed, at=self.file.place(call), blank=False)

    def value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        if isinstance(node, ast.Attribute):
            of = self.value(node.value) if node.attr in (*KEEPING, "grad") else None
            if node.attr == "grad":  # in the dtype of what it is the gradient of
                return self.computed(GRADIENT, [of], node, of.guess) if isinstance(of, Tensor) else None
            return of
        if isinstance(node, ast.Subscript):
            of = self.value(node.value)
            return of if isinstance(of, Tensor) and not of.guess else None
        if isinstance(node, ast.UnaryOp):
            return self.value(node.operand)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Call):
            return self.called(node)
        return None

    def binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(left, Difference):
            return (
                replace(left, relative=True)
                if isinstance(node.op, ast.Div) and not isinstance(right, Difference)
                else None
            )
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if isinstance(node.op, ast.Sub):
                return Difference(left, right)
            return self.computed("@" if isinstance(node.op, ast.MatMult) else "arithmetic", [left, right], node)
        known = left if isinstance(left, Tensor) else right
        if isinstance(node.op, ast.MatMult) and isinstance(known, Tensor):
            self.learn(node.right if known is left else node.left, known)
            return self.computed("@", [known], node)
        if isinstance(known, Tensor) and self.is_number(node.right if known is left else node.left):
            return self.computed("arithmetic", [known], node)
        return None

    def is_number(self, node: ast.expr) -> bool:
        """Whether an expression is a number, by itself, by its name here, or in each run of the test."""
        if isinstance(node, ast.Name):
            return node.id in self.choices.numbers or self.numbers.get(node.id) is not None
        return isinstance(node, ast.Constant)

    def learn(self, node: ast.expr, other: Tensor) -> None:
        """The other operand of a product has the dtype of the first, or torch refuses it."""
        while isinstance(node, ast.Attribute) and node.attr in KEEPING:
            node = node.value
        if isinstance(node, ast.Name):
            self.learnt[node.id] = Tensor(other.dtype, self.file.place(node), parameter=other.parameter)

    def computed(self, op: str, operands: list[Tensor], node: ast.expr, guess: bool = False) -> Tensor | None:
        """What an op makes of its operands: in half where all are half, in fp32 where one is."""
        at = self.file.place(node)
        guess = guess or any(each.guess for each in operands)
        parameter = next((each.parameter for each in operands if each.parameter), "")
        before = next((each.computed for each in operands if each.computed), "")
        wide = [each for each in operands if each.dtype == "fp32"]
        if len(wide) == len(operands):
            return Tensor("fp32", at, before, op, parameter, guess)
        halves = {each.dtype for each in operands} - {"fp32"}
        if wide or len(halves) > 1:
            return None if guess else Tensor("fp32", at, before, op, parameter)
        dtype = halves.pop()
        return Tensor(dtype, at, dtype, op, parameter, guess)

    def called(self, call: ast.Call) -> Value:
        function, name = call.func, self.names.of(call.func)
        last = function.attr if isinstance(function, ast.Attribute) else name.rpartition(".")[2]
        if name.startswith("torch.") and last in CREATORS:
            return self.created(call, last)
        if name.startswith("torch.") and last in ("abs", "max", "amax", "mean") and call.args:
            return self.measured(self.value(call.args[0]), last)
        if name.startswith("torch."):
            return self.torch_call(call, last)
        if isinstance(function, ast.Attribute):
            of = self.value(function.value)
            if of is not None:
                return self.method(of, call, function)
            if last in ("to", "half", "bfloat16"):
                whole = self.names.of(innermost(call).func) in ("torch.randint", "torch.arange", "torch.randperm")
                return self.made_half(call, last) if not whole else None  # what is made of whole numbers may be exact
        last = last or ("model" if isinstance(function, ast.Call) else "")
        operands = [
            value
            for each in (*call.args, *(k.value for k in call.keywords))
            if isinstance(value := self.value(each), Tensor)
        ]
        if any(k.arg in OTHER_DTYPE for k in call.keywords) or not last:
            given = argument(call, "dtype")
            made = self.dtype(given, call) if given is not None and last.islower() and not operands else None
            return replace(made, guess=True) if made is not None and made.dtype != "fp32" else None
        if not operands:
            return None
        made = self.computed(last, operands, call, guess=True)
        by = called_by(function)
        return replace(made, by=by) if made is not None and by not in ("self", *self.names.imported) else made

    def torch_call(self, call: ast.Call, op: str) -> Tensor | None:
        flat = [
            part for each in call.args for part in (each.elts if isinstance(each, (ast.Tuple, ast.List)) else [each])
        ]
        operands = [value for each in flat if isinstance(value := self.value(each), Tensor)]
        if not operands:
            return None
        dtype = argument(call, "dtype")
        if dtype is not None:
            made = self.dtype(dtype, call)
            return (
                replace(made, op=op, computed=made.dtype if made.dtype != "fp32" else operands[0].computed)
                if made
                else None
            )
        if op in MOVING:
            return operands[0] if len({each.dtype for each in operands}) == 1 else None
        if op in COMPUTING or op in ("exp", "log", "tanh", "sigmoid", "gelu", "silu", "add", "mul"):
            return self.computed(op, operands, call)
        return self.computed(op, operands, call, guess=True)

    def created(self, call: ast.Call, name: str) -> Tensor | None:
        given = argument(call, "dtype")
        if given is None:
            if name in LIKE:
                of = self.value(call.args[0]) if call.args else None
                made = replace(of, computed="", op="") if isinstance(of, Tensor) else None
            else:
                made = Tensor("fp32", self.file.place(call)) if name in ("randn", "rand") and not _splat(call) else None
        else:
            made = self.dtype(given, call)
        return replace(made, blank=name.startswith("empty")) if made is not None else None

    def dtype(self, node: ast.expr, at: ast.expr) -> Tensor | None:
        """A tensor of the dtype that an expression names."""
        place = self.file.place(at)
        if isinstance(node, ast.Name) and node.id in self.choices.halves:
            return Tensor(self.choices.halves[node.id], place, parameter=node.id)
        if isinstance(node, ast.Name):
            node = self.choices.written.get(node.id, node)
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            of = self.value(node.value)
            return Tensor(of.dtype, place, parameter=of.parameter) if isinstance(of, Tensor) and not of.guess else None
        package, _, last = self.names.of(node).rpartition(".")
        if package != "torch":
            return None
        return Tensor(HALVES[last], place) if last in HALVES else Tensor("fp32", place) if last in WIDE else None

    def method(self, of: Tensor | Difference, call: ast.Call, function: ast.Attribute) -> Value:
        name = function.attr
        if isinstance(of, Difference):
            return self.measured(of, name)
        if name in ("half", "bfloat16", "float", "double"):
            dtype = {"half": "fp16", "bfloat16": "bf16"}.get(name, "fp32")
            return replace(
                of, dtype=dtype, at=self.file.place(call), guess=False, parameter=of.parameter if of.computed else ""
            )
        if name in ("to", "type"):
            return self.cast(of, call)
        if name == "numpy":
            return of if of.dtype != "bf16" else None
        if name in KEEPING:
            viewed = name == "view" and any(self.names.of(each).startswith("torch.") for each in call.args)
            return None if viewed else of
        if name in COMPUTING:
            others = [value for each in call.args if isinstance(value := self.value(each), Tensor)]
            return self.computed(name, [of, *others], call) if argument(call, "dtype") is None else None
        return None

    def made_half(self, call: ast.Call, name: str) -> Tensor | None:
        """What is known of a cast to half of something that is not known."""
        at = self.file.place(call)
        if name != "to":
            return Tensor("bf16" if name == "bfloat16" else "fp16", at)
        made = (self.dtype(each, call) for each in (*call.args, *(k.value for k in call.keywords if k.arg == "dtype")))
        return next((each for each in made if each is not None and each.dtype != "fp32"), None)

    def cast(self, of: Tensor, call: ast.Call) -> Tensor | None:
        for node in (*call.args, *(k.value for k in call.keywords if k.arg in ("dtype", None))):
            made = self.dtype(node, call)
            if made is not None:
                return replace(of, dtype=made.dtype, at=made.at, parameter=made.parameter or of.parameter, guess=False)
            text = ast.unparse(node)
            if not isinstance(node, ast.Constant) and "device" not in text and "cuda" not in text and "cpu" not in text:
                return None
        return of

    def measured(self, of: Value, name: str) -> Value:
        if not isinstance(of, Difference):
            return of if isinstance(of, Tensor) and name == "abs" else None
        if name in ("max", "amax"):
            return replace(of, most=True)
        if name == "mean":
            return replace(of, mean=True)
        return of if name in ("abs", "item", "float") else None

    def judged(self, node: ast.expr) -> Iterator[Event]:
        """What the calls in an expression say."""
        for each in walk(node):
            if not isinstance(each, ast.Call):
                continue
            name, function = self.names.of(each.func), each.func
            if isinstance(function, ast.Attribute) and function.attr == "numpy" and not each.args:
                yield from self.to_numpy(self.value(function.value), ".numpy()", each)
            elif name in ("numpy.asarray", "numpy.array") and each.args:
                yield from self.to_numpy(self.value(each.args[0]), f"np.{name.rpartition('.')[2]}", each)
            elif name in DEFAULTS or last_name(function).endswith(CLOSER):
                yield from self.close(each, name if name in DEFAULTS else CLOSE)
            elif last_name(function) in ("assertLess", "assertLessEqual") and len(each.args) > 1:
                yield from self.bounded(each.args[0], each.args[1], each)

    def to_numpy(self, value: Value, call: str, node: ast.Call) -> Iterator[Event]:
        if isinstance(value, Tensor) and value.dtype == "bf16" and not value.guess:
            yield ToNumpy(self.file.place(node), (), call, value.at, value.parameter)

    def close(self, call: ast.Call, name: str) -> Iterator[Event]:
        """``assert_close(actual, expected, rtol=…, atol=…)`` and its like."""
        positions = (None, None) if name == CLOSE else (2, 3)
        given = [argument(call, word, position) for word, position in zip(("rtol", "atol"), positions, strict=True)]
        if _splat(call) or (name == CLOSE and None in given):
            return
        tolerances = []
        for node, default in zip(given, DEFAULTS.get(name, (0.0, 0.0)), strict=True):
            tolerance = default if node is None else self.number(node)
            if tolerance is None:
                return
            tolerances.append(tolerance)
        sides = [self.value(each) for each in call.args[:2]]
        if len(sides) == 2 and isinstance(sides[0], Tensor) and isinstance(sides[1], Tensor):
            if sides[0].dtype != sides[1].dtype and name.startswith("torch.") and argument(call, "check_dtype") is None:
                return  # torch refuses to compare them: a guess was wrong
            names = [name if (name := called_by(each)) in self.held else "" for each in call.args[:2]]
            yield from self.held_to("close", sides[0], sides[1], tolerances[0], tolerances[1], call, names)

    def bounded(self, less: ast.expr, more: ast.expr, node: ast.expr) -> Iterator[Event]:
        """``assert relative_error < 1e-3``"""
        value, bound = self.value(less), self.number(more)
        if not isinstance(value, Difference) or bound is None:
            return
        if value.mean and value.relative:
            yield from self.held_to("mean", value.left, value.right, bound, 0.0, node)
        elif value.most and not value.relative:
            yield from self.held_to("most", value.left, value.right, 0.0, bound, node)

    def number(self, node: ast.expr) -> float | None:
        """A number that is written down, here or in the one assignment to a name."""
        node = self.choices.chosen(node)
        if isinstance(node, ast.Name) and node.id not in self.numbers:
            node = self.choices.written.get(node.id, node)
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Name):
            value = self.numbers.get(node.id)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def held_to(
        self,
        kind: Literal["close", "mean", "most"],
        left: Tensor,
        right: Tensor,
        rtol: float,
        atol: float,
        node: ast.expr,
        names: Sequence[str] = ("", ""),
    ) -> Iterator[Event]:
        """The comparison of a result that was computed in half with a reference: one in fp32, or another op's in half."""
        told = Comparison(names, self.makers, self.restores).of(left, right)
        if told is not None:
            result, against = told
            parameter = result.parameter if against == "fp32" else left.parameter or right.parameter
            at = self.file.place(node)
            yield HeldTo(at, (), kind, result.computed, rtol, atol, result.op, against, result.at, parameter)


def _ends(node: ast.stmt) -> bool:
    """Whether a statement ends a test: it returns, raises, or skips it."""
    if isinstance(node, (ast.Return, ast.Raise)):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) in ("skip", "skipTest", "xfail", "fail")


def _splat(call: ast.Call) -> bool:
    """Whether a call hands on keywords that are not written here."""
    return any(keyword.arg is None for keyword in call.keywords)
