"""The dtypes that a file's own launches give to the pointers of its Triton kernels.

Plain functions and the module's top level are followed in order, flow by flow, through the calls between them. A dtype counts only where
the file shows it: a constructor's ``dtype=``, a cast, an assertion. What a function that nobody here calls takes for a tensor has the
dtype that its callers give it (``FOLLOWS``). What is unknown stays unknown.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from precisionlint.kernel_facts import FOLLOWS, Typed
from precisionlint.patterns import regex
from precisionlint.subjects import File

DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e5m2": "e5m2",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2fnuz": "e5m2fnuz",
}
"""torch's names of dtypes, and the words that are used here."""

CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
SAME = frozenset(
    {"contiguous", "view", "reshape", "t", "transpose", "permute", "clone", "detach", "cuda", "flatten", "squeeze"}
    | {"unsqueeze", "expand", "requires_grad_", "narrow", "T", "mT"}
)
"""Methods and attributes of a tensor that keep its dtype."""
HOLDERS = frozenset({"self", "ctx"})
"""What tensors of a program's own are kept on, whose dtype is decided where they are made."""
NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])
ROUNDS = 4
"""How many calls deep a dtype is followed from function to function."""

Reaching = frozenset[Typed]
NOTHING: Reaching = frozenset()


NO_TENSOR = regex(
    r"^(?:self|cls|ctx|args|kwargs|dtype|device|shape|size|dim|axis|eps|\w+_(?:size|dim|dtype|shape)|num_\w+|is_\w+)$",
    re.IGNORECASE,
)
"""Parameters that are no tensors, by their names."""
SCALARS = regex(r"\b(?:int|float|bool|str|Size|dtype|device|Callable|tuple|list|dict)\b", re.I)
"""Annotations of what is no tensor."""


class _Function(Struct):
    """``group``: the class that it is a method of, with what that class saves from its forward for its backward; ``returned``: the dtypes
    of what it returns, in order; ``called``: whether the file calls it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    group: _Saved
    called: bool = False
    given: dict[str, Reaching] = field(default_factory=dict)
    returned: list[Reaching] = field(default_factory=list)

    def taken(self) -> dict[str, Reaching]:
        """The parameters' dtypes: what the file's calls give, or what outside callers do."""
        arguments = self.node.args
        if self.called:
            return dict(self.given)
        return {
            each.arg: frozenset({Typed(FOLLOWS, False)})
            for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if not NO_TENSOR.search(each.arg)
            and (each.annotation is None or not SCALARS.search(ast.unparse(each.annotation)))
        } | self.given


class _Saved(Struct):
    """What ``ctx.save_for_backward`` keeps."""

    tensors: list[Reaching] = field(default_factory=list)


def reaching(file: File, kernels: Mapping[str, ast.FunctionDef]) -> tuple[dict[str, dict[str, Reaching]], set[str]]:
    """(kernel name -> parameter -> the dtypes with which the file's launches reach it, the kernels that it launches)."""
    flow = _Flow(file, kernels)
    for _ in range(ROUNDS):
        before = flow.known()
        flow.module()
        if flow.known() == before:
            break
    return flow.found, flow.launched


class _Flow:
    def __init__(self, file: File, kernels: Mapping[str, ast.FunctionDef]) -> None:
        self.file = file
        self.kernels = kernels
        self.found: dict[str, dict[str, Reaching]] = {name: {} for name in kernels}
        self.launched: set[str] = set()
        groups = {method: saved for node in file.every(ast.ClassDef) for saved in [_Saved()] for method in node.body}
        self.bodies = [
            _Function(node, groups.get(node, _Saved())) for node in file.functions if node not in kernels.values()
        ]
        self.functions = {each.node.name: each for each in self.bodies if each.node not in groups}
        self.outside = _Function(ast.FunctionDef("", NO_ARGUMENTS, [], []), _Saved())
        self.at = self.outside
        for node in file.every(ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in self.functions:
                self.functions[node.func.id].called = True

    def known(self) -> int:
        """How much is known: it only grows."""
        sizes = [len(each) for function in self.functions.values() for each in function.given.values()]
        sizes += [len(each) for function in self.bodies for each in (*function.returned, *function.group.tensors)]
        return sum(sizes) + sum(len(each) for given in self.found.values() for each in given.values())

    def module(self) -> None:
        self.at = self.outside
        body = [each for each in self.file.syntax.body if not isinstance(each, (ast.FunctionDef, ast.ClassDef))]
        self.block(body, {})
        for function in self.bodies:
            self.at = function
            arguments = function.node.args
            scope = function.taken()
            parameters = [*arguments.posonlyargs, *arguments.args]
            defaults = [None] * (len(parameters) - len(arguments.defaults)) + list(arguments.defaults)
            for parameter, default in zip(parameters, defaults, strict=True):
                dtype = _dtype(default) if default is not None else ""
                if dtype:
                    place = self.file.place(default) if default is not None else None
                    scope[parameter.arg] = scope.get(parameter.arg, NOTHING) | {Typed(dtype, False, place)}
            self.block(function.node.body, scope)

    def block(self, body: Sequence[ast.stmt], scope: dict[str, Reaching]) -> None:
        """Follows statements in their order; branches are joined, loops entered once."""
        for statement in body:
            self.statement(statement, scope)

    def statement(self, node: ast.stmt, scope: dict[str, Reaching]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        if isinstance(node, ast.Assert):
            self.narrow(node.test, scope)
        for call in _calls(node):
            self.call(call, scope)
        if isinstance(node, ast.Return) and node.value is not None:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            self.at.returned = merged(self.at.returned, [self.value(each, scope) for each in parts])
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self.bind(node.targets[0], node.value, scope)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.bind(node.target, node.value, scope)
        elif isinstance(node, ast.If):
            then, other = dict(scope), dict(scope)
            self.block(node.body, then)
            self.block(node.orelse, other)
            for name in then.keys() | other.keys():
                scope[name] = then.get(name, NOTHING) | other.get(name, NOTHING)
        elif isinstance(node, (ast.For, ast.While, ast.With, ast.Try)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for each in getattr(node, part, []):
                    self.block(each.body if isinstance(each, ast.ExceptHandler) else [each], scope)

    def bind(self, target: ast.expr, value: ast.expr, scope: dict[str, Reaching]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = self.value(value, scope)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, part in zip(target.elts, [self.value(part, scope) for part in value.elts], strict=True):
                if isinstance(each, ast.Name):
                    scope[each.id] = part
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = self.parts(value)
            for index, each in enumerate(target.elts):
                if isinstance(each, ast.Name):
                    scope[each.id] = parts[index] if index < len(parts) else NOTHING

    def parts(self, value: ast.expr) -> list[Reaching]:
        """What is unpacked of a call of one of the file's functions, or of what a forward has saved."""
        if isinstance(value, ast.Attribute) and value.attr == "saved_tensors":
            return self.at.group.tensors
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self.functions:
            return self.functions[value.func.id].returned
        return []

    def narrow(self, test: ast.expr, scope: dict[str, Reaching]) -> None:
        """``assert x.dtype == torch.float16``, ``assert x.dtype in (...)``, also joined by ``and``."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for each in test.values:
                self.narrow(each, scope)
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return
        left, right = test.left, test.comparators[0]
        if not (isinstance(left, ast.Attribute) and left.attr == "dtype" and isinstance(left.value, ast.Name)):
            return
        options = right.elts if isinstance(right, (ast.Tuple, ast.List, ast.Set)) else [right]
        dtypes = [_dtype(each) for each in options]
        if isinstance(test.ops[0], (ast.Eq, ast.In)) and all(dtypes):
            at = self.file.place(test)
            scope[left.value.id] = frozenset(Typed(dtype, False, at) for dtype in dtypes)

    def value(self, node: ast.expr, scope: Mapping[str, Reaching]) -> Reaching:
        """The dtypes that an expression's tensor (or the dtype that it is) can have."""
        if isinstance(node, ast.Name):
            return scope.get(node.id, NOTHING)
        if dtype := _dtype(node):
            return frozenset({Typed(dtype, False, self.file.place(node))})
        if isinstance(node, ast.Attribute):
            if node.attr in SAME or node.attr == "dtype":
                return self.value(node.value, scope)
            held = isinstance(node.value, ast.Name) and node.value.id in HOLDERS
            return (
                frozenset({Typed(FOLLOWS, False, handed=False)})
                if held and not NO_TENSOR.search(node.attr)
                else NOTHING
            )
        if isinstance(node, ast.Subscript):  # x[:, 0], or a table of dtypes: of_triton[x.dtype]
            key = node.slice
            asked = isinstance(key, ast.Attribute) and key.attr == "dtype"
            return self.value(key if asked else node.value, scope)
        if isinstance(node, ast.IfExp):
            return self.value(node.body, scope) | self.value(node.orelse, scope)
        if isinstance(node, ast.Call):
            return self.made(node, scope)
        return NOTHING

    def made(self, node: ast.Call, scope: Mapping[str, Reaching]) -> Reaching:
        at = self.file.place(node)
        for keyword in node.keywords:
            if keyword.arg == "dtype":
                return frozenset(replace(each, at=at) for each in self.value(keyword.value, scope))
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            returned = self.functions[node.func.id].returned
            return returned[0] if len(returned) == 1 else NOTHING
        if not isinstance(node.func, ast.Attribute):
            return NOTHING
        method, owner = node.func.attr, node.func.value
        if method in CASTS and not node.args:
            return frozenset({Typed(CASTS[method], False, at)})
        if method in ("to", "type") and node.args:
            for argument in node.args:
                if given := self.value(argument, scope):
                    return frozenset(replace(each, at=at) for each in given)
            return self.value(owner, scope) if method == "to" else NOTHING
        if method.endswith("_like") and node.args:
            return frozenset(replace(each, at=at) for each in self.value(node.args[0], scope))
        if method.startswith("new_"):
            return frozenset(replace(each, at=at) for each in self.value(owner, scope))
        return self.value(owner, scope) if method in SAME else NOTHING

    def call(self, node: ast.Call, scope: Mapping[str, Reaching]) -> None:
        """A launch ``kernel[grid](...)`` or a call of one of the file's functions hands its arguments' dtypes on."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "save_for_backward":
            self.at.group.tensors = merged(self.at.group.tensors, [self.value(each, scope) for each in node.args])
        function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        name = function.id if isinstance(function, ast.Name) else ""
        if isinstance(node.func, ast.Subscript) and name in self.kernels:
            self.launched.add(name)
            self.hand(node, self.kernels[name].args, self.found[name], scope)
        elif name in self.functions:
            called = self.functions[name]
            self.hand(node, called.node.args, called.given, scope)

    def hand(
        self,
        node: ast.Call,
        parameters: ast.arguments,
        given: dict[str, Reaching],
        scope: Mapping[str, Reaching],
    ) -> None:
        names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            names = names[: next(i for i, each in enumerate(node.args) if isinstance(each, ast.Starred))]
        pairs = [*zip(names, node.args, strict=False), *((each.arg, each.value) for each in node.keywords if each.arg)]
        for name, argument in pairs:
            if name and (value := self.value(argument, scope)):
                given[name] = given.get(name, NOTHING) | value


def merged(one: list[Reaching], other: list[Reaching]) -> list[Reaching]:
    """Two lists of dtypes, place by place."""
    return [a | b for a, b in itertools.zip_longest(one, other, fillvalue=NOTHING)]


def _calls(node: ast.stmt) -> Iterator[ast.Call]:
    """The calls that a statement makes itself, not those of the blocks inside of it."""
    pending: list[ast.AST] = [
        each for each in ast.iter_child_nodes(node) if not isinstance(each, (ast.stmt, ast.ExceptHandler))
    ]
    while pending:
        each = pending.pop()
        if isinstance(each, ast.Call):
            yield each
        if not isinstance(each, ast.Lambda):
            pending.extend(ast.iter_child_nodes(each))


def _dtype(node: ast.expr | None) -> str:
    """The word for ``torch.float16``, ``tl.float16`` and the like, or nothing."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "tl"):
        return DTYPES.get(node.attr, "")
    return ""
