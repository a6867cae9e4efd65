"""The runs of a test: what its parameters are in each of them, as its decorators and loops list it, or as those who call it hand it over."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property

from msgspec import Struct, field

from precisionlint.recipes import HALVES
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.subjects import File
from precisionlint.subjects.names import Names

RUNS = 6
"""So many different runs in half are followed."""
CALLERS = 24
"""So many calls of a function are looked at."""


class Run(Struct, frozen=True):
    """``halves``: parameter -> ``"bf16"`` or ``"fp16"``; ``values``: parameter -> what is written for it, for those of the same row."""

    halves: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, ast.expr] = field(default_factory=dict)


class Choices(Struct):
    """What a run decides of the expressions in it. ``written``: what stands for a name, of the run or of the file; ``numbers``: the
    parameters that are numbers in every run."""

    names: Names
    halves: dict[str, str]
    written: dict[str, ast.expr]
    numbers: frozenset[str] = frozenset()

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


class Calls:
    """The calls of a file's own functions."""

    def __init__(self, file: File) -> None:
        self.file = file

    @cached_property
    def of(self) -> dict[str, list[tuple[FunctionDef, ast.Call]]]:
        """Name of a function -> its calls, each with the function that it stands in."""
        found: dict[str, list[tuple[FunctionDef, ast.Call]]] = {}
        names = {each.name for each in self.file.functions}
        for function in self.file.functions:
            for call in walk(function):
                if isinstance(call, ast.Call):
                    called = self.called(call)
                    if called in names and called != function.name:
                        found.setdefault(called, []).append((function, call))
        return found

    @staticmethod
    def called(call: ast.Call) -> str:
        """The function that a call runs, or that ``partial(function, …)`` will."""
        name = ast.unparse(call.func).rpartition(".")[2]
        return ast.unparse(call.args[0]) if name == "partial" and call.args else name


def handed(
    names: Names, node: FunctionDef, constants: Mapping[str, ast.expr], calls: Calls, depth: int = 2
) -> list[Run]:
    """The runs of a function in half, by what its callers hand it: a dtype, or a parameter that has one in their own runs."""
    words = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg != "self"]
    found: list[Run] = []
    for caller, call in calls.of.get(node.name, ())[:CALLERS]:
        given = call.args[1:] if ast.unparse(call.func).endswith("partial") else call.args
        if any(isinstance(each, ast.Starred) for each in given):
            continue
        values = dict(zip(words, given, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
        plain = {word: value for word, value in values.items() if isinstance(value, ast.Constant)}
        written = {word: dtype for word, value in values.items() if (dtype := half(names, value))}
        passed = {word: value.id for word, value in values.items() if isinstance(value, ast.Name)}
        theirs = runs(names, caller, None, constants) if passed else []
        if depth > 1 and passed and not any(run.halves for run in theirs):
            theirs = handed(names, caller, constants, calls, depth - 1)
        for run in theirs or [Run()]:
            halves = written | {word: run.halves[name] for word, name in passed.items() if name in run.halves}
            if halves:
                found.append(
                    Run(halves, plain | {w: run.values[name] for w, name in passed.items() if name in run.values})
                )
    return each_once(found)


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
    return each_once(found) or [Run()]


def numbers_of(names: Names, node: FunctionDef, constants: Mapping[str, ast.expr]) -> frozenset[str]:
    """The parameters of a test for which its decorators list nothing but numbers."""
    decorators = (each for each in node.decorator_list if isinstance(each, ast.Call))
    listed = (each for decorator in decorators for each in _listed(names, decorator, constants))
    return frozenset(words[0] for words, rows in listed if len(words) == 1 and rows and all(map(_is_number, rows)))


def _is_number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def each_once(found: list[Run]) -> list[Run]:
    """The first few of these runs that differ; those in bf16, of which tests expect too much more often, before those in fp16."""
    told = {(tuple(run.halves.items()), tuple(map(ast.dump, run.values.values()))): run for run in found}
    return sorted(told.values(), key=lambda run: sorted(run.halves.values()))[:RUNS]


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
