"""The runs of a test: what its parameters are in each of them, as its decorators and loops list it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from precisionlint.recipes import HALVES
from precisionlint.source.parsing import walk
from precisionlint.subjects.names import Names

RUNS = 6
"""So many different runs in half are followed."""

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


class Run(Struct, frozen=True):
    """``halves``: parameter -> ``"bf16"`` or ``"fp16"``; ``values``: parameter -> what is written for it, for those of the same row."""

    halves: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, ast.expr] = field(default_factory=dict)


class Choices(Struct):
    """What a run decides of the expressions in it. ``written``: what stands for a name, of the run or of the file."""

    names: Names
    halves: dict[str, str]
    written: dict[str, ast.expr]

    def decided(self, test: ast.expr) -> bool | None:
        """What a test of the run's dtype comes to (``dtype == torch.bfloat16``, ``dtype in (…)``), or None."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decided(test.operand)
            return None if inner is None else not inner
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.left, ast.Name):
            return None
        right = test.comparators[0]
        options = right.elts if isinstance(right, (ast.Tuple, ast.List, ast.Set)) else [right]
        of = self.halves.get(test.left.id)
        if of is None and test.left.id in self.written:  # dtype = torch.bfloat16
            of = half(self.names, self.written[test.left.id]) or None
        if of is None or not all(self.names.of(each).startswith("torch.") for each in options):
            return None
        within = of in {half(self.names, each) for each in options}
        return within == isinstance(test.ops[0], (ast.Eq, ast.Is, ast.In))

    def chosen(self, node: ast.expr) -> ast.expr:
        """The expression that one stands for in this run: the side of a decided choice, the entry of a table for the run's dtype."""
        if isinstance(node, ast.IfExp):
            decided = self.decided(node.test)
            return node if decided is None else self.chosen(node.body if decided else node.orelse)
        table, key = None, None
        if isinstance(node, ast.Subscript):
            table, key = node.value, node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            table, key = node.func.value, node.args[0]
        if isinstance(table, ast.Name):
            table = self.written.get(table.id)
        if isinstance(table, ast.Dict) and isinstance(key, ast.Name) and key.id in self.halves:
            for word, value in zip(table.keys, table.values, strict=True):
                if word is not None and half(self.names, word) == self.halves[key.id]:
                    return self.chosen(value)
        return node


def half(names: Names, node: ast.expr) -> str:
    """The half dtype of torch that an expression names, or nothing."""
    package, _, last = names.of(node).rpartition(".")
    return HALVES.get(last, "") if package == "torch" else ""


def runs(names: Names, node: FunctionDef, around: ast.ClassDef | None, constants: Mapping[str, ast.expr]) -> list[Run]:
    """The runs of a test in half, each once; one run of which nothing is known where none are listed."""
    found: list[Run] = []
    decorators = [*node.decorator_list, *(around.decorator_list if around is not None else [])]
    for decorator in decorators:
        if isinstance(decorator, ast.Call):
            for words, rows in _listed(names, decorator, constants):
                found += _of_rows(names, words, rows)
    for loop in walk(node):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
            found += _of_rows(names, [loop.target.id], _elements(loop.iter, constants))
    told = {(tuple(run.halves.items()), tuple(map(ast.dump, run.values.values()))): run for run in found}
    # bf16, of which tests expect too much more often, before fp16
    first = sorted(told.values(), key=lambda run: sorted(run.halves.values()))
    return first[:RUNS] or [Run()]


def _listed(
    names: Names, call: ast.Call, constants: Mapping[str, ast.expr]
) -> Iterator[tuple[list[str], list[ast.expr]]]:
    """(parameters, the rows of their values) of ``parametrize(…)``, torch's ``@dtypes(…)`` and hypothesis's ``@given(…)``."""
    name = names.of(call.func).rpartition(".")[2]
    if name == "parametrize" and len(call.args) > 1:
        words = call.args[0]
        listed = words.elts if isinstance(words, (ast.Tuple, ast.List)) else [words]
        texts = [each.value for each in listed if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        yield (
            [word.strip() for text in texts for word in text.split(",") if word.strip()],
            _elements(call.args[1], constants),
        )
    elif name in ("dtypes", "dtypesIfCUDA"):
        yield ["dtype"], list(call.args)
    elif name == "given":
        for keyword in call.keywords:
            drawn = keyword.value
            if (
                keyword.arg
                and isinstance(drawn, ast.Call)
                and names.of(drawn.func).endswith("sampled_from")
                and drawn.args
            ):
                yield [keyword.arg], _elements(drawn.args[0], constants)


def _elements(node: ast.expr, constants: Mapping[str, ast.expr]) -> list[ast.expr]:
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    return list(node.elts) if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else []


def _of_rows(names: Names, words: list[str], rows: list[ast.expr]) -> Iterator[Run]:
    for row in rows:
        values = [row]
        if isinstance(row, ast.Call) and names.of(row.func) == "pytest.param":
            values = list(row.args)
        elif len(words) > 1:
            values = list(row.elts) if isinstance(row, (ast.Tuple, ast.List)) else []
        given = dict(zip(words, values, strict=False)) if len(values) == len(words) else {}
        halves = {name: dtype for name, value in given.items() if (dtype := half(names, value))}
        if halves:
            yield Run(halves, {name: value for name, value in given.items() if name not in halves})
