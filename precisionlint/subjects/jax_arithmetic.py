"""Arithmetic of JAX programs in the dtype of what they are handed: norms by hand, logarithms of probabilities, decays of a recurrence.

jax lifts no op: ``jnp.mean`` and ``jnp.sum`` of bf16 add up in fp32, but the squares before are rounded, and so is the result. What a
function casts to a wider dtype itself, or is only ever handed so by its file, is sound; whether its arrays are half, its callers say.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from precisionlint.events import Event
from precisionlint.facts import AsHanded
from precisionlint.patterns import regex
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.subjects import File
from precisionlint.subjects.names import Names, last_name

PACKAGES = frozenset({"jax", "optax", "flax", "haliax", "haiku"})
ROOTS = frozenset({"rsqrt", "sqrt"})
LOGS = frozenset(
    {"log_softmax", "logsumexp", "softmax_cross_entropy", "softmax_cross_entropy_with_integer_labels"}
)  # fmt: skip
WIDE = regex(r"float32|float64|promote_types|\bf32\b|fp32|\.astype\(\w*dtype\)")
LOGITS = regex(r"(?:^|_)logits?(?:$|_)")
DECAY = regex(r"^(?:[Aa]_log|log_[Aa]|dt_log|log_dt|log_decay|decay_log|log_lambda)$")
"""What a recurrence calls the logarithm of its decay, which it learns."""
DEPTH = 4


def read(file: File) -> Iterator[Event]:
    """The facts of a file, function by function, with the functions in each.

    Raises: UnreadableError.
    """
    names = Names(file)
    if not names.has(*PACKAGES):
        return
    inside = {each for node in file.functions for each in walk(node) if each is not node}
    bodies = Bodies(file, names, [node for node in file.functions if node not in inside])
    for body in bodies.all:
        yield from body.facts(bodies)


class Bodies:
    """The outermost functions of a file."""

    def __init__(self, file: File, names: Names, nodes: list[FunctionDef]) -> None:
        self.all = [Body(file, names, node) for node in nodes]

    @cached_property
    def calls(self) -> dict[str, list[tuple[Body, ast.Call]]]:
        """Name -> the calls of it as a function or a method of ``self``, each with the function that it stands in."""
        found: dict[str, list[tuple[Body, ast.Call]]] = {}
        for body in self.all:
            for call in body.calls:
                found.setdefault(last_name(call.func), []).append((body, call))
        return found

    def widens(self, name: str) -> bool:
        """Whether all that call a function of the file hand it what they have made wider."""
        calls = self.calls.get(name, [])
        return bool(calls) and all(call.args and body.is_wide(call.args[0]) for body, call in calls)


class Body:
    """One function: its names, and which of them it has made wider, wherever it does."""

    def __init__(self, file: File, names: Names, node: FunctionDef) -> None:
        self.file = file
        self.names = names
        self.node = node
        self.nodes = list(walk(node))
        self.values: dict[str, list[ast.expr]] = {}
        for each in self.nodes:
            if isinstance(each, ast.Assign):
                for target in each.targets:
                    if isinstance(target, ast.Name):
                        self.values.setdefault(target.id, []).append(each.value)

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [each for each in self.nodes if isinstance(each, ast.Call)]

    def restores(self, name: str) -> bool:
        """Whether it keeps the dtype of an array, as who casts back to it later does: ``dtype = x.dtype``."""
        kept = (value for values in self.values.values() for value in values)
        return any(
            isinstance(value, ast.Attribute) and value.attr == "dtype" and root(value.value) == name for value in kept
        )

    def is_wide(self, node: ast.expr, depth: int = DEPTH) -> bool:
        """Whether an expression is cast to a wider dtype, or made of a name that is, somewhere in the function."""
        if WIDE.search(ast.unparse(node)):
            return True
        used = {each.id for each in walk(node) if isinstance(each, ast.Name)} if depth else set()
        return any(self.is_wide(value, depth - 1) for name in used for value in self.values.get(name, []))

    def facts(self, bodies: Bodies) -> Iterator[Event]:
        for call in self.calls:
            package, _, op = self.names.of(call.func).rpartition(".")
            if package.partition(".")[0] not in PACKAGES or not call.args:
                continue
            at, name, kind = self.lossy(call, op)
            if at is None or self.is_wide(call.args[0]) or self.restores(name) or bodies.widens(self.node.name):
                continue
            yield AsHanded(self.file.place(at), (), kind, name)

    def lossy(self, call: ast.Call, op: str) -> tuple[ast.expr | None, str, str]:
        """Where an op loses most if it is half, what it is taken of, and what it is told as."""
        given = call.args[0]
        if op in ROOTS:
            return *self.mean_of_squares(given), "norm"
        if op in LOGS:
            name = root(given)
            return call if LOGITS.search(name) else None, name, op
        name = self.decay(given) if op == "exp" else ""
        return call if name else None, name, op

    def mean_of_squares(self, node: ast.expr) -> tuple[ast.expr | None, str]:
        """The mean of the squares of a name that stands under a root, and that name."""
        for each in self.followed(node):
            if isinstance(each, ast.Call) and last_name(each.func) == "mean":
                outside = self.names.of(each.func).partition(".")[0] in PACKAGES
                of = each.args[0] if outside and each.args else getattr(each.func, "value", None)
                for square in self.followed(of) if of is not None else ():
                    if name := squared(square):
                        return each, name
        return None, ""

    def followed(self, node: ast.expr) -> Iterator[ast.expr]:
        """The parts of an expression, and what its names were bound to once."""
        for each in walk(node):
            if isinstance(each, ast.expr):
                yield each
            if isinstance(each, ast.Name) and len(bound := self.values.get(each.id, [])) == 1:
                yield from (part for part in walk(bound[0]) if isinstance(part, ast.expr))

    def decay(self, node: ast.expr) -> str:
        """The learnt logarithm of a decay in an expression: ``self.A_log``, ``params["A_log"]``."""
        for each in walk(node):
            key = each.slice if isinstance(each, ast.Subscript) else None
            name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
            name = each.attr if isinstance(each, ast.Attribute) else name
            if DECAY.search(name):
                return name
        return ""


def squared(node: ast.expr) -> str:
    """The name that is squared: ``jnp.square(x)``, ``x ** 2``, ``x * x``."""
    if isinstance(node, ast.Call) and last_name(node.func) == "square" and node.args:
        return root(node.args[0])
    if isinstance(node, ast.BinOp):
        power = isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 2
        product = isinstance(node.op, ast.Mult) and ast.dump(node.left) == ast.dump(node.right)
        return root(node.left) if power or product else ""
    return ""


def root(node: ast.expr) -> str:
    """The name of what is scaled, indexed and reshaped: ``logits`` of ``logits[:, :-1] / t``, and of ``output.logits``."""
    while True:
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return node.id if isinstance(node, ast.Name) else ""
