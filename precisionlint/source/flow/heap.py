"""What the value flow keeps beside values: places, source files with their names, functions, and objects with their attributes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.source.apis import USUAL, table
from precisionlint.source.flow.buffers import read_beyond_tables
from precisionlint.source.flow.words import TEST_FILE
from precisionlint.source.parsing import walk
from precisionlint.valueflow import BOOL, INTEGERS, WEIGHTS, Dtypes, Value

if TYPE_CHECKING:
    from precisionlint.source.project import Project
    from precisionlint.subjects import File

Environment = dict[str, Value]


class Spot(Struct, frozen=True):
    """A node of a file: a place that is worked out when a finding needs it."""

    file: File
    node: Any

    @property
    def place(self) -> Place:
        return self.file.place(self.node)


NOTHING = Value("unknown")
KEPT = regex(r"_keep_in_fp32_modules(?:_strict)? = \[([^\]]*)\]")
WORD = regex(r"""["'](\w+)["']""")
PART = regex(r"self\.(\w+) = (\w+)\(")
"""A part of a model, and the class that makes it."""
DEPTH = 4
"""How deep calls of the project's own functions are entered."""

METRIC = regex(r"(?:torchmetrics|(?:pytorch_)?lightning)\b.*\bMetric$")
"""The class that metrics derive from, which is a module."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a top level, and of the tests and attempts in it."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from flat(statement.body)
            for handler in getattr(statement, "handlers", ()):
                yield from flat(handler.body)
            yield from flat(statement.orelse)
        else:
            yield statement


def made(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement makes."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Assign():
            for target in statement.targets:
                yield from (node.id for node in walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=ast.Name(name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0]


def handed_on(tree: ast.AST) -> frozenset[str]:
    """The variables that are set once and do nothing but hand on what they hold, as ``**options``: nothing changes them in between."""
    nodes = walk(tree)
    handed = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg is None}
    names = [node for node in nodes if isinstance(node, ast.Name) and id(node) not in handed]
    stores = Counter(node.id for node in names if isinstance(node.ctx, ast.Store))
    touched = {node.id for node in names if not isinstance(node.ctx, ast.Store)}
    return frozenset(name for name, times in stores.items() if times == 1 and name not in touched)


class Source(Struct, eq=False, dict=True):
    """A file of the project and the names of its top level."""

    file: File
    project: Project
    names: Environment = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        return self.file.data.decode(errors="replace")

    @cached_property
    def spread(self) -> frozenset[str]:
        """See ``handed_on``: of the whole file."""
        return handed_on(self.file.syntax)

    @cached_property
    def tests(self) -> bool:
        """Whether it is a file of tests, by where it lies."""
        return TEST_FILE.search(self.file.display) is not None

    @cached_property
    def numpy(self) -> bool:
        """Whether the file speaks of NumPy's functions."""
        return b"np." in self.file.data or b"numpy." in self.file.data

    @cached_property
    def kept(self) -> frozenset[str]:
        """The parts that models of transformers and diffusers keep in fp32, by their names."""
        if b"_keep_in_fp32_modules" not in self.file.data:
            return frozenset()
        return frozenset(name for listed in KEPT.findall(self.text) for name in WORD.findall(listed))

    @cached_property
    def kept_classes(self) -> frozenset[str]:
        """The classes of those parts."""
        parts = PART.findall(self.text) if self.kept else []
        return frozenset(made for part, made in parts if part in self.kept)

    @cached_property
    def makers(self) -> dict[str, list[ast.stmt]]:
        """Name of the top level -> the statements that make it."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in flat(self.file.syntax.body):
            for name in made(statement):
                found.setdefault(name, []).append(statement)
        for statement in found.pop("*", ()):
            module = statement.module if isinstance(statement, ast.ImportFrom) and not statement.level else None
            for name in (USUAL.keys() | table().star(module or "").keys()) - found.keys():
                found[name] = [statement]
        return found


class Function(Struct, eq=False, dict=True):
    """A function where it is written: its file, the variables around it, and the class that it is a method of."""

    node: FunctionNode
    source: Source
    around: tuple[Environment, ...]
    owner: Class | None = None

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name

    @cached_property
    def spread(self) -> frozenset[str]:
        """See ``handed_on``."""
        return handed_on(self.node)

    @property
    def siblings(self) -> frozenset[str]:
        """The methods that a method calls of its own object."""
        return self.source.file.siblings(self.node)


class Class(Struct, eq=False, dict=True):
    """A class of the project: its methods, what it derives from, and one object that stands for all of its instances."""

    node: ast.ClassDef
    source: Source
    bases: tuple[Value, ...]
    attributes: Environment = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)
    ready: bool = False
    settled: bool = False
    version: int = 0
    """How many times an attribute became another kind of value."""

    def keep(self, name: str, value: Value) -> None:
        """An attribute of its objects holds this from here on."""
        old = self.attributes.get(name)
        if old is None or old.op != value.op or old.dtypes != value.dtypes:
            self.version += 1
        self.attributes[name] = value

    def settle_buffers(self) -> None:
        """Once ``__init__`` has run, buffers follow the dtype that the model is cast to, unless the class keeps them from it."""
        self.settled = True
        if self.method("_apply") is not None:
            return
        for name, value in self.attributes.items():
            if not self.keeps(name):
                self.attributes[name] = settled(value, "tabled" if self.tabled(name, value) else None)

    def tabled(self, name: str, value: Value) -> bool:
        """Whether a buffer is read again only beyond the tables that are made of it at once."""
        return value.op == "buffer" and value.ref is None and read_beyond_tables(self.node, name)

    def keeps(self, name: str) -> bool:
        """Whether the file's models keep this parameter or buffer in fp32, whatever dtype they are loaded in: by its name, or by that of
        the part that this class makes of them."""
        return self.node.name in self.source.kept_classes or any(kept in name for kept in self.source.kept)

    @cached_property
    def lineage(self) -> tuple[Class, ...]:
        """The class and the project's classes above it, nearest first."""
        found: list[Class] = []
        todo: list[Class] = [self]
        while todo and len(found) < 12:
            current = todo.pop(0)
            if current not in found:
                found.append(current)
                todo.extend(base.ref for base in current.bases if base.op == "class")
        return tuple(found)

    @cached_property
    def outside(self) -> frozenset[str]:
        """The canonical names of the outside classes that it derives from."""
        return frozenset(base.name for cls in self.lineage for base in cls.bases if base.op == "external")

    @property
    def kind(self) -> str:
        """``"module"``, ``"function"`` (an autograd.Function), ``"test"`` or ``""``."""
        if self.derived:
            return self.derived
        held = (value.name for value in self.attributes.values() if value.op == "module")
        if self.method("forward") is not None or any(not name.endswith("Loss") for name in held):
            return "module"
        return ""

    @cached_property
    def derived(self) -> str:
        """Its kind by what it derives from and what it is called."""
        if any(name.endswith("autograd.Function") for name in self.outside):
            return "function"
        if any(name.rpartition(".")[2] == "TestCase" for name in self.outside) or self.node.name.startswith("Test"):
            return "test"
        if any(name.endswith((".Module", "Module")) or name.startswith("torch.nn.") for name in self.outside):
            return "module"
        if any(METRIC.match(name) for name in self.outside):
            return "module"
        return ""

    def method(self, name: str) -> Function | None:
        for cls in self.lineage:
            if name in cls.methods:
                return cls.methods[name]
        return None

    def attribute(self, name: str) -> Value | None:
        for cls in self.lineage:
            if name in cls.attributes:
                return cls.attributes[name]
        return None


def settled(value: Value, ref: str | None = None) -> Value:
    """An attribute once its object is made: a buffer has the dtype of the weights, and so has one that a setting makes a parameter."""
    if value.op == "buffer" and not value.dtypes <= (INTEGERS | BOOL):
        return Value("buffer", value.inputs, WEIGHTS, value.at, value.name, ref=ref or value.ref)
    if value.op == "either" and any(each.op == "buffer" for each in value.inputs):
        parts = tuple(map(settled, value.inputs))
        dtypes: Dtypes = frozenset().union(*(part.dtypes for part in parts))
        return Value("either", parts, dtypes, value.at, value.name)
    return value


def instance(cls: Class | None) -> Value:
    return Value("instance", name=cls.node.name if cls else "", ref=cls)


class Spent(Exception):  # noqa: N818 - no error: reading ends here
    """The budget of a file is used up."""
