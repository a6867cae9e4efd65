"""What a file defines, names and imports: enough to say which functions can matter, without lowering it.

A function matters if its text, or that of what it names, holds a mark of a precision event. The bodies of all others are never interpreted.
"""

from __future__ import annotations

import ast
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from msgspec import Struct

from precisionlint.patterns import regex
from precisionlint.source.marks import GUARDED, MARKS, Marks
from precisionlint.source.parsing import BLOCKS, DEFINITIONS, LEAVES, lines_spanned, statements, walk, words_in

CLASS_OF_OTHERS = regex(r"\.([A-Z]\w*)")
CLASS = regex(r"(?<![\w.])[A-Z]\w*")
HOLDER = regex(r"(?<![\w.)\]])([^\W\d]\w*)(?:\s*\.\s*\w+)*\s*\.\s*$")
"""What stands before an attribute, from the variable on that it is one of."""
REACH = 120
"""So many characters before an attribute are looked at for the variable."""
TYPE_TEST = regex(r"\bis(?:instance|subclass)\(\s*[\w.\[\]]+\s*,\s*(\([\w.,\s]*\)|[\w.]+)\s*\)")
"""A test that only asks what something is."""


def named_in(text: str) -> frozenset[str]:
    """The words in a text that may name what its file knows: ``nn.Linear`` is no class ``Linear`` of the file's."""
    elsewhere = set(CLASS_OF_OTHERS.findall(text))
    if elsewhere:
        elsewhere.difference_update(CLASS.findall(text))
    return words_in(text) - elsewhere


class Definition:
    """A function or class of a file: where its text stands; what is in it is looked up when somebody asks."""

    __slots__ = ("_marks", "named", "span", "text")

    def __init__(self, text: str, span: tuple[int, int]) -> None:
        self.text = text
        self.span = span
        self.named: frozenset[str] | None = None
        """Which of its file's names it means, once somebody has asked (``Outline.named``)."""
        self._marks: dict[str, bool] = {}

    def holds(self, kind: str) -> bool:
        """Whether its text holds a mark of this kind (see ``marks.MARKS``)."""
        if kind not in self._marks:
            self._marks[kind] = MARKS[kind].found(self.text, *self.span)
        return self._marks[kind]


class Imported(Struct, frozen=True):
    """A name of another module: ``name`` is None where the module itself is meant."""

    module: str
    level: int
    name: str | None


def renamings(node: ast.Assign) -> Iterator[tuple[str, str, ast.Assign]]:
    """``step = step_in_half if fp16 else plain_step``, ``self.step = self._step``: what is called by the one name may be the other."""
    value = node.value
    for each in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
        meant = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
        for name in set[str]().union(*map(last_identifiers, node.targets)) - {meant} if meant else ():
            yield name, meant, node


class Shadow(Struct, frozen=True):
    """A function, in whose text these names are its parameters and no one else's."""

    start: int
    end: int
    names: frozenset[str]


class Outline:
    """The definitions and imports of one file. ``is_outside``: whether an import is of none of the project's files."""

    def __init__(self, syntax: ast.Module, lines: list[str], is_outside: Callable[[Imported], bool]) -> None:
        self.is_outside = is_outside
        self.definitions: dict[str, list[Definition]] = {}
        self.imports: dict[str, Imported] = {}
        self.stars: list[Imported] = []
        self.text = text = "\n".join(lines)
        starts = [0, *accumulate(len(line) + 1 for line in lines)]
        renamed: list[tuple[str, str, ast.Assign]] = []
        functions: list[tuple[int, int, ast.arguments]] = []

        def define(name: str, first: int, last: int) -> None:
            definition = Definition(text, (starts[first - 1], starts[last] - 1))
            self.definitions.setdefault(name, []).append(definition)

        for node in statements(syntax.body):
            if isinstance(node, DEFINITIONS):
                define(node.name, *lines_spanned(node))
                if isinstance(node, SCOPES):
                    functions.append((starts[node.lineno - 1], starts[node.end_lineno or node.lineno], node.args))
            elif isinstance(node, ast.Assign):
                renamed += renamings(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = Imported(alias.name, 0, None)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    target = Imported(node.module or "", node.level, alias.name)
                    if alias.name == "*":
                        self.stars.append(target)
                    else:
                        self.imports[alias.asname or alias.name] = target
        for name, meant, assigned in renamed:
            if meant in self.definitions or meant in self.imports:
                define(name, assigned.lineno, assigned.end_lineno or assigned.lineno)
        # Who says ``__init__`` calls that of a class above, which it names as well; it is no one's in particular.
        self.names = frozenset(name for name in (*self.definitions, *self.imports) if not name.startswith("__"))
        self.shadows = [
            Shadow(start, end, names)
            for start, end, parameters in functions
            if (names := self.names & parameters_of(parameters))
        ]

    def named(self, definition: Definition) -> frozenset[str]:
        """Which of its file's names a definition means: all its words, of thousands of files, would be hundreds of megabytes."""
        if definition.named is None:
            definition.named = self.named_in(*definition.span)
        return definition.named

    def named_in(self, start: int, end: int) -> frozenset[str]:
        """Which names of the file a part of its text means."""
        text = self.text[start:end]
        said = self.names & named_in(text)
        tests = (
            [match.span(1) for match in TYPE_TEST.finditer(text)] if "isinstance" in text or "subclass" in text else []
        )
        aside = [Shadow(start + first, start + last, self.names) for first, last in tests]
        shadows = [shadow for shadow in self.shadows if shadow.start < end and start < shadow.end]
        return frozenset(name for name in said if self.is_meant(name, start, end, [*shadows, *aside]))

    def is_meant(self, name: str, start: int, end: int, shadows: list[Shadow]) -> bool:
        """Whether a word of a part of the text is the file's name somewhere in it: not where it is a parameter, an attribute of a
        library's, or what a test asks whether something is."""
        shadows = [shadow for shadow in shadows if name in shadow.names]
        at = self.text.find(name, start, end)
        while at >= 0:
            after = at + len(name)
            whole = not is_word(self.text[at - 1 : at]) and not is_word(self.text[after : after + 1])
            before = self.text[max(start, at - REACH) : at].rstrip(" \t\n\\")
            if whole and before.endswith("."):
                holder = HOLDER.search(before)
                imported = self.imports.get(holder[1]) if holder is not None else None
                if imported is None or not self.is_outside(imported):
                    return True
            elif whole and not any(shadow.start <= at < shadow.end for shadow in shadows):
                return True
            at = self.text.find(name, after, end)
        return False

    def holds(self, kind: str) -> bool:
        """Whether any definition holds a mark of this kind."""
        return any(definition.holds(kind) for named in self.definitions.values() for definition in named)


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def parameters_of(parameters: ast.arguments) -> frozenset[str]:
    """The names of a function's parameters, but for those whose defaults may say the same name of what stands around it."""
    every = (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, parameters.vararg, parameters.kwarg)
    defaults = [
        each for each in (*parameters.defaults, *parameters.kw_defaults) if not isinstance(each, ast.Constant | None)
    ]
    return frozenset(each.arg for each in every if each is not None) - set[str]().union(*map(identifiers_of, defaults))


ASKS = Marks(":=", patterns={"if": r"if\b", "enabled": r"enabled\b"})
"""What a line must hold for an expression in it to ask or name something on its own."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)


def telling_names(syntax: ast.Module, lines: list[str]) -> set[str]:
    """The names that decide whether something happens to precision: those in the tests around it, and what they are made from.

    Two paths that differ in the value of any other name are one path.
    """
    return Telling(lines).read(syntax)


class Telling:
    """Collects the telling names of one file."""

    def __init__(self, lines: list[str]) -> None:
        text = "\n".join(lines)
        starts = [0, *accumulate(len(line) + 1 for line in lines)]
        self.guarded = counted(GUARDED.places(text), starts)
        self.asking = counted(ASKS.places(text), starts)
        self.names: set[str] = set()
        self.asked: dict[str, int] = {}
        self.leaving: set[str] = set()
        self.made: dict[str, list[ast.expr]] = {}

    def read(self, syntax: ast.Module) -> set[str]:
        found = list(statements(syntax.body))
        scopes = [(node.lineno, node.end_lineno or node.lineno) for node in found if isinstance(node, SCOPES)]
        for node in found:
            if isinstance(node, (ast.If, ast.While)):
                self.asks(node, scopes)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                self.makes(node.targets if isinstance(node, ast.Assign) else [node.target], node.value)
            elif isinstance(node, ast.Return) and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                self.names |= identifiers_of(node.value)
            self.inside(node)
        # A test that only leaves the function matters to a later one that asks the same.
        self.names |= {name for name in self.leaving if self.asked[name] > 1}
        self.grow()
        return self.names

    def guards(self, first: int, last: int | None) -> bool:
        """Whether one of these lines touches precision."""
        return self.guarded[last or first] > self.guarded[first - 1]

    def asks(self, node: ast.If | ast.While | ast.IfExp, scopes: list[tuple[int, int]]) -> None:
        test = identifiers_of(node.test)
        for name in test:
            self.asked[name] = self.asked.get(name, 0) + 1
        if self.guards(node.lineno, node.end_lineno):
            self.names |= test
        elif isinstance(node, ast.If) and any(isinstance(last, LEAVES) for last in (*node.body, *node.orelse)):
            around = [scope for scope in scopes if scope[0] <= node.lineno <= scope[1]]
            if self.guards(*max(around)) if around else self.guarded[-1]:
                self.leaving |= test

    def makes(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        if value is not None:
            for name in {name for target in targets for name in last_identifiers(target)}:
                self.made.setdefault(name, []).append(value)

    def inside(self, node: ast.AST) -> None:
        """What the expressions of a statement ask and name, the blocks in it aside."""
        first = node.decorator_list[0].lineno if isinstance(node, DEFINITIONS) and node.decorator_list else None
        last = getattr(node, "end_lineno", None)
        if BLOCKS.get(type(node)):
            body = getattr(node, BLOCKS[type(node)][0])
            last = getattr(body[0], "lineno", last) if body else last
        start = first or getattr(node, "lineno", None)
        if start is None or last is None or self.asking[last] == self.asking[start - 1]:
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.expr, ast.withitem, ast.arguments, ast.keyword)):
                for inner in walk(child):
                    if isinstance(inner, ast.IfExp):
                        self.asks(inner, [])
                    elif isinstance(inner, ast.NamedExpr):
                        self.makes([inner.target], inner.value)
                    elif isinstance(inner, ast.keyword) and inner.arg == "enabled":
                        self.names |= identifiers_of(inner.value)

    def grow(self) -> None:
        """Adds what the telling names are made from."""
        todo = list(self.names)
        while todo:
            for value in self.made.pop(todo.pop(), ()):
                parts = identifiers_of(value)
                if len(parts) <= 8:
                    todo.extend(parts - self.names)
                    self.names |= parts


def counted(places: Iterable[int], starts: list[int]) -> list[int]:
    """How many of the first 0, 1, 2 … lines hold one of these places; ``starts`` are the places at which lines begin."""
    lines = {bisect(starts, place) for place in places}
    return [0, *accumulate(number in lines for number in range(1, len(starts)))]


ASIDE = frozenset(
    {
        "self",
        "torch",
        "args",
        "cfg",
        "config",
        "opt",
        "len",
        "int",
        "str",
        "bool",
        "isinstance",
        "hasattr",
        "getattr",
        "get",
    }
)
"""Names in a test that say nothing of what it asks."""


def identifiers_of(node: ast.AST | None) -> set[str]:
    """The names that an expression asks for: of ``a.b.c`` the last, whose value it is."""
    found: set[str] = set()
    todo = [node] if node is not None else []
    while todo:
        child = todo.pop()
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
            holder: ast.AST = child.value
            while isinstance(holder, ast.Attribute):
                holder = holder.value
            if isinstance(holder, ast.Name):
                continue
            todo.append(holder)
            continue
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier():
            found.add(child.value)
        todo.extend(ast.iter_child_nodes(child))
    return found - ASIDE


def last_identifiers(target: ast.AST) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Attribute):
        return {target.attr}
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for element in target.elts for name in last_identifiers(element)}
    return set()
