"""The files of a project: where a module's name leads, and each file read, parsed and lowered when it is needed.

Reads nothing outside the project's root and runs nothing. Which functions can matter at all is decided here, by the words
that they and the functions they name contain: what holds none of them is never interpreted.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import libcst as cst

from precisionlint.source import program as p
from precisionlint.source.lower import lower_body, lower_module

WORD = re.compile(r"[^\W\d]\w*")
IMPORTED = re.compile(rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import|import[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*))", re.M)

TRIGGER = re.compile(
    r"\bbackward\w*\(|\.step\(|\.scale\(|unscale_|zero_grad|get_scale|[Aa]utocast|\.grad\b|parameters\(|\bhalf\b|b?float16|float32\b"
    r"|from_pretrained|state_dict|torch\.save|requires_grad|custom_op|custom_[fb]wd|\.apply\(|[Oo]ptim|clip_grad|no_sync|nullcontext"
    r"|contextmanager|set_default_dtype|matmul_precision|allow_tf32|fp32_precision|[Ss]caler|\bamp\b|_amp\b|\bamp_|fp16|bf16"
    r"|loss_scale|mixed_precision|param_groups|triton|torch\.ops\.|torch\.library"
)
"""What a function's text must hold for its body to matter."""
STRONG = re.compile(
    r"\bbackward\w*\(|\.step\(|unscale_|[Ss]caler\b|clip_grad|torch\.save|custom_op|autograd\.Function|\w\.apply\(|torch\.ops\.|triton"
)
"""What a program's text must reach for it to be able to hold a fault at all."""
MARKS = {"event": TRIGGER, "strong": STRONG}

FILE_WORDS = (
    b"GradScaler", b"scaler", b"unscale_", b"autocast", b"clip_grad", b"backward(", b"zero_grad", b"bfloat16", b"float16", b".half(",
    b"optim.", b"Adam", b"SGD(", b"custom_op", b"Function)", b".grad", b"loss_scale", b"FullyShardedDataParallel", b"triton",
    b"torch.save", b"state_dict", b"from_pretrained", b"requires_grad",
)  # fmt: skip
EVALUATION = re.compile(r"(?:^|_)(?:eval|evaluate|evaluation|validate|validation|valid|test|infer|inference|predict|generate|sample)(?:_|$)")
NO_GRAD = re.compile(r"\s*@(?:torch\.)?(?:no_grad|inference_mode)")
TRAINS = re.compile(r"\bbackward\w*\(|\.step\(|unscale_|zero_grad|scaler|clip_grad|optim", re.I)
SMALL = 5
"""Functions of up to so many lines are always entered: getters and switches are what conditions are made of."""

KEPT = 40
"""How many parsed files a project keeps between two programs: memory against parsing again."""

SCALER_USE = re.compile(r"(\w+)\.unscale_\(|(\w+)\.scale\([^\n]*\)\.backward\(")

PRECISION = re.compile(rb"allow_tf32|float32_matmul_precision|fp32_precision")
PRECISION_FILES = 5_000
"""How many files of a project are searched for a setting of the matmul precision."""

MODEL_USE = re.compile(r"(\w+)\.(?:named_parameters|parameters|train|eval|load_state_dict)\(")

BUILDING = re.compile(r"requires_grad|\.half\(|bfloat16|float16|[Ss]caler|optim|autocast|default_dtype|\.backward\(")
OWN_OPS = re.compile(r"custom_op|autograd\.Function|triton|torch\.ops\.|autocast")

SKIPPED_NAMES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "transformers", "yaml", "tqdm"}


class Unreadable(Exception):
    """A file that cannot be read as Python: its line, and what is wrong in one sentence."""

    def __init__(self, line: int | None, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass(frozen=True)
class Definition:
    """A function or class of a file: its lines, every word in them, and which kinds of mark its text holds (see ``MARKS``)."""

    name: str
    is_class: bool
    first: int
    last: int
    words: frozenset[str]
    marks: frozenset[str]


def parse(data: bytes) -> tuple[cst.Module, ast.Module]:
    """The two trees of a file. ``ast`` goes first: it names the true place of a syntax error, and refuses what libcst cannot take.

    Raises: Unreadable.
    """
    if b"\0" in data:
        raise Unreadable(data.count(b"\n", 0, data.index(b"\0")) + 1, "holds a NUL byte: not Python source")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            syntax = ast.parse(data)
    except SyntaxError as error:
        raise Unreadable(error.lineno or None, f"syntax error: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise Unreadable(None, "nested too deeply to be parsed") from None
    except ValueError as error:
        raise Unreadable(None, f"cannot be decoded: {error}") from None
    try:
        return cst.parse_module(data), syntax
    except cst.ParserSyntaxError as error:
        raise Unreadable(error.raw_line, "libcst cannot parse this file") from None
    except (UnicodeDecodeError, LookupError) as error:
        raise Unreadable(None, f"cannot be decoded: {error}") from None
    except (RecursionError, MemoryError):
        raise Unreadable(None, "nested too deeply to be parsed") from None


def definitions(body: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """(first line, last line) of every def and class of an ast, in source order."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno
            yield from definitions(node.body)
            continue
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from definitions(inner)


def definition_nodes(node: Any) -> Iterator[Any]:
    """Every def and class of a libcst tree, in the same order as ``definitions``."""
    for child in getattr(node, "body", ()) if isinstance(node, (cst.Module, cst.IndentedBlock)) else ():
        kind = type(child)
        if kind is cst.SimpleStatementLine:
            continue
        if kind is cst.FunctionDef or kind is cst.ClassDef:
            yield child
        if kind is cst.Match:
            for case in child.cases:
                yield from definition_nodes(case.body)
            continue
        yield from definition_nodes(child.body)
        for handler in getattr(child, "handlers", ()):
            yield from definition_nodes(handler.body)
        orelse = getattr(child, "orelse", None)
        while isinstance(orelse, cst.If):
            yield from definition_nodes(orelse.body)
            orelse = orelse.orelse
        if orelse is not None:
            yield from definition_nodes(orelse.body)
        final = getattr(child, "finalbody", None)
        if final is not None:
            yield from definition_nodes(final.body)


class ProjectModule:
    """One file of the project, parsed and lowered at its top level."""

    def __init__(self, project: Project, path: Path, name: str, data: bytes) -> None:
        self.project = project
        self.path = path
        self.name = name
        self.tree, syntax = parse(data)
        self.text = data.decode(self.tree.encoding, errors="replace")
        self.lines = self.text.splitlines()
        self.spans: dict[Any, tuple[int, int]] = dict(
            zip(definition_nodes(self.tree), definitions(syntax.body), strict=False)
        )
        self.block, self.functions = lower_module(self.tree, self.spans)
        self.kept = frozenset(telling_names(syntax, self.lines))
        # What is used as only a scaler is, whatever its name.
        self.scaler_names = {a or b for a, b in SCALER_USE.findall(self.text)}
        self.model_names = set(MODEL_USE.findall(self.text))
        self._words: dict[p.Function, frozenset[str]] = {}
        self._triggered: dict[p.Function, bool] = {}
        self._strong: dict[p.Function, bool] = {}
        self._reaching: dict[str, set[str]] = {}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def body(self, function: p.Function) -> p.Block:
        return lower_body(function, self.spans)

    def words(self, function: p.Function) -> frozenset[str]:
        """Every word in a function's lines."""
        if function not in self._words:
            self._words[function] = frozenset(WORD.findall(self.source_of(function)))
        return self._words[function]

    def source_of_class(self, definition: p.ClassDef) -> str:
        first, last = self.spans.get(definition.node, (1, 0))
        return "\n".join(self.lines[first - 1 : last])

    def builds_precision(self, function: p.Function) -> bool:
        """Whether a module's ``__init__`` does more than put layers together, or its file holds ops that autocast may not know."""
        return bool(BUILDING.search(self.source_of(function))) or bool(OWN_OPS.search(self.text))

    def source_of(self, function: p.Function) -> str:
        if function.first_line:
            return "\n".join(self.lines[function.first_line - 1 : function.last_line])
        return self.tree.code_for_node(function.node)

    @cached_property
    def definitions(self) -> list[Definition]:
        """Every function and class of the file, nested ones too."""
        found = []
        for node, (first, last) in self.spans.items():
            text = "\n".join(self.lines[first - 1 : last])
            marks = frozenset(kind for kind, pattern in MARKS.items() if pattern.search(text))
            found.append(Definition(node.name.value, isinstance(node, cst.ClassDef), first, last, frozenset(WORD.findall(text)), marks))
        return found

    def reaching(self, kind: str) -> set[str]:
        """The names of functions and classes whose text, or that of what they name, holds a mark of this kind."""
        if kind not in self._reaching:
            self._reaching[kind] = set()  # what an import cycle sees meanwhile
            imported = self.imported(kind)
            names = {definition.name for definition in self.definitions if kind in definition.marks}
            grown = True
            while grown:
                before = len(names)
                known = names | imported
                for definition in self.definitions:
                    if definition.name not in names and not definition.words.isdisjoint(known - {definition.name}):
                        names.add(definition.name)
                grown = len(names) > before
            self._reaching[kind] = names | imported
        return self._reaching[kind]

    def imported(self, kind: str) -> set[str]:
        """The names among the imported ones that reach a mark in their own file."""
        names: set[str] = set()
        for instr in self.block.code:
            if isinstance(instr, p.Import):
                target = self.project.find(instr.module, instr.level, self)
                if target is None or not self.project.worth_reading(target):
                    continue
                module = self.project.load(target)
                if module is None or module is self:
                    continue
                reaching = module.reaching(kind)
                if instr.name in (None, "*"):
                    names |= reaching
                elif instr.name in reaching and instr.alias:
                    names.add(instr.alias)
        return names

    def is_strong(self, function: p.Function) -> bool:
        """Whether a function can train: a backward, a step or a scaler is within its reach."""
        if function not in self._strong:
            source = self.source_of(function)
            self._strong[function] = bool(STRONG.search(source)) or not self.words(function).isdisjoint(
                self.reaching("strong") - {function.name}
            )
        return self._strong[function]

    def is_relevant(self, function: p.Function) -> bool:
        """Whether a function's body is worth interpreting."""
        if function.first_line and function.last_line - function.first_line < SMALL:
            return True
        if function not in self._triggered:
            source = self.source_of(function)
            self._triggered[function] = bool(TRIGGER.search(source))
            if EVALUATION.search(function.name) or NO_GRAD.match(source):
                # What only evaluates trains nothing, whatever it casts.
                self._triggered[function] = bool(TRAINS.search(source))
                if not self._triggered[function]:
                    return False
        return self._triggered[function] or not self.words(function).isdisjoint(self.reaching("event") - {function.name})

    @cached_property
    def positions(self) -> Any:
        """libcst node -> CodeRange; computed only when a finding needs it."""
        from libcst.metadata import MetadataWrapper, PositionProvider

        return MetadataWrapper(self.tree, unsafe_skip_copy=True).resolve(PositionProvider)


GUARDED = re.compile(
    r"\bbackward\w*\(|\.step\(|\.scale\(|unscale_|clip_grad|zero_grad|[Aa]utocast|GradScaler|\.grad\b|scaler|\.half\(|float16|optim\.|no_sync"
)
"""What a branch must hold for the test before it to be remembered."""
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def telling_names(syntax: ast.Module, lines: list[str]) -> set[str]:
    """The names that decide whether something happens to precision: those in the tests around it, and what they are made from.

    Two paths that differ in the value of any other name are one path.
    """
    names: set[str] = set()
    assigned: list[tuple[set[str], set[str]]] = []
    guarded_lines = {number for number, line in enumerate(lines, 1) if GUARDED.search(line)}
    scopes = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(syntax)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]

    def guards(first: int, last: int | None) -> bool:
        return any(number in guarded_lines for number in range(first, (last or first) + 1))

    def scope_guards(line: int) -> bool:
        around = [scope for scope in scopes if scope[0] <= line <= scope[1]]
        return guards(*max(around)) if around else bool(guarded_lines)

    asked: dict[str, int] = {}
    leaving: set[str] = set()
    for node in ast.walk(syntax):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            for name in identifiers_of(node.test):
                asked[name] = asked.get(name, 0) + 1
            leaves = isinstance(node, ast.If) and any(isinstance(last, LEAVES) for last in (*node.body, *node.orelse))
            if guards(node.lineno, node.end_lineno):
                names |= identifiers_of(node.test)
            elif leaves and scope_guards(node.lineno):
                leaving |= identifiers_of(node.test)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned.append(({name for t in targets for name in last_identifiers(t)}, identifiers_of(node.value)))
        elif isinstance(node, ast.keyword) and node.arg == "enabled":
            names |= identifiers_of(node.value)
        elif isinstance(node, ast.Return) and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            names |= identifiers_of(node.value)
    # A test that only leaves the function matters to a later one that asks the same.
    names |= {name for name in leaving if asked[name] > 1}
    grown = True
    while grown:
        before = len(names)
        for targets, parts in assigned:
            if len(parts) <= 8 and not names.isdisjoint(targets):
                names |= parts
        grown = len(names) > before
    return names


def identifiers_of(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier():
            found.add(child.value)
    return found - {"self", "torch", "args", "cfg", "config", "opt"}


def last_identifiers(target: ast.AST) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Attribute):
        return {target.attr}
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for element in target.elts for name in last_identifiers(element)}
    return set()


def python_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder, hidden folders left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in ("node_modules", "site-packages"))
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


def find_root(path: Path) -> Path:
    """The project that a file belongs to: the nearest folder above it with a pyproject.toml, setup.py or .git; where there is none,
    the current folder if the file is in it, else the file's own."""
    for folder in path.parents:
        if any((folder / mark).exists() for mark in ROOT_MARKS):
            return folder
    here = Path.cwd()
    return here if here in path.parents else path.parent


class Project:
    """The modules under one root, each loaded at most once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[Path, ProjectModule | None] = {}
        self.errors: dict[Path, Unreadable] = {}
        self._data: dict[Path, bytes | None] = {}
        self._worth: dict[Path, bool] = {}
        self._found: dict[tuple[str, int, Path], Path | None] = {}

    def read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except OSError:
            return None

    def load(self, path: Path, data: bytes | None = None) -> ProjectModule | None:
        """The module of a file, or None where it cannot be read (why: ``errors``)."""
        if path not in self.modules:
            if data is None:
                data = self.read(path)
            self.modules[path] = None
            if data is not None:
                try:
                    self.modules[path] = ProjectModule(self, path, self.name_of(path), data)
                except Unreadable as error:
                    self.errors[path] = error
                except RecursionError:
                    self.errors[path] = Unreadable(None, "nested too deeply to be read")
        return self.modules[path]

    def forget_large(self) -> None:
        """Drops the trees once there are many: the next program loads what it needs itself."""
        if len(self.modules) > KEPT:
            self.modules.clear()

    def sets_matmul_precision(self, path: Path) -> bool:
        """Whether a file that this one imports, or that imports it, says how fp32 products are to run."""
        seen: set[Path] = set()
        todo = [path]
        while todo and len(seen) < 200:
            current = todo.pop()
            data = None if current in seen else self.read(current)
            seen.add(current)
            if data is not None:
                if PRECISION.search(data):
                    return True
                todo.extend(target for target in self.imports_of(current, data) if target is not None)
        return any(path in self.imports_of(setter, data) for setter, data in self.precision_setters)

    @cached_property
    def precision_setters(self) -> list[tuple[Path, bytes]]:
        """The files under the root that set the matmul precision."""
        paths = sorted(itertools.islice(python_files(self.root), PRECISION_FILES))
        found = ((path, self.read(path)) for path in paths)
        return [(path, data) for path, data in found if data is not None and PRECISION.search(data)]

    def name_of(self, path: Path) -> str:
        try:
            parts = list(path.relative_to(self.root).with_suffix("").parts)
        except ValueError:
            parts = [path.stem]
        if parts and parts[-1] == "__init__":
            parts.pop()
        if parts and parts[0] == "src":
            parts = parts[1:]
        return ".".join(parts)

    def worth_reading(self, path: Path) -> bool:
        """Whether a file holds a word that a precision event needs, or imports a file that does."""
        if path not in self._worth:
            self._worth[path] = False
            data = self.read(path)
            if data is None:
                return False
            if any(word in data for word in FILE_WORDS):
                self._worth[path] = True
            elif path.name == "__init__.py" or len(data) < 20_000:
                self._worth[path] = any(
                    target is not None and self.holds_word(target) for target in self.imports_of(path, data)
                )
        return self._worth[path]

    def holds_word(self, path: Path) -> bool:
        data = self.read(path)
        return data is not None and any(word in data for word in FILE_WORDS)

    def imports_of(self, path: Path, data: bytes) -> Iterator[Path | None]:
        for match in IMPORTED.finditer(data):
            for part in (match[1] or match[2]).decode("ascii", "replace").split(","):
                name = part.strip()
                level = len(name) - len(name.lstrip("."))
                yield self.resolve(name.lstrip("."), level, path)

    def find(self, name: str, level: int, module: ProjectModule) -> Path | None:
        return self.resolve(name, level, module.path)

    def resolve(self, name: str, level: int, path: Path) -> Path | None:
        """The file of a module as it is imported in ``path``; None where it is not the project's."""
        key = (name, level, path.parent)
        if key not in self._found:
            self._found[key] = self._resolve(name, level, path)
        return self._found[key]

    def _resolve(self, name: str, level: int, path: Path) -> Path | None:
        parts = [part for part in name.split(".") if part]
        if level:
            folder = path.parent
            for _ in range(level - 1):
                folder = folder.parent
            return self.file_of(folder, parts) if self.inside(folder) else None
        if not parts or (parts[0] in SKIPPED_NAMES and not (self.root / parts[0]).is_dir()):
            return None
        for folder in self.search_folders(path):
            found = self.file_of(folder, parts)
            if found is not None:
                return found
        return None

    def search_folders(self, path: Path) -> Iterator[Path]:
        """Where an absolute import may look: beside a script, then up to the root and its src folder."""
        folder = path.parent
        while self.inside(folder):
            yield folder
            if folder == self.root:
                break
            folder = folder.parent
        yield self.root / "src"

    def inside(self, folder: Path) -> bool:
        return folder == self.root or self.root in folder.parents

    def file_of(self, folder: Path, parts: list[str]) -> Path | None:
        base = folder.joinpath(*parts)
        init = base / "__init__.py"
        if init.is_file():
            return init
        if parts:
            single = base.with_name(base.name + ".py")
            if single.is_file():
                return single
        return None
