"""How a Python file spells names of outside APIs: by its imports, and by one more where none serves."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from precisionlint.findings import Place
from precisionlint.source.fixes import NEWLINE, NoFixError, Span
from precisionlint.source.parsing import walk


class Names:
    """The names of one file. Raises SyntaxError for a text that is no Python."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.imported: dict[str, tuple[str, int]] = {}
        """Name at the top level -> what it stands for, and the line from which on."""
        bound = Counter(bindings(self.tree))
        for statement in self.tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                for name, full in imports(statement):
                    self.imported.setdefault(name, (full, statement.end_lineno or statement.lineno))
        self.bound = frozenset(bound)
        # What is bound by anything but one import may stand for something else where it is read.
        top = Counter(name for each in self.tree.body for name in bindings_of_import(each))
        self.imported = {name: held for name, held in self.imported.items() if bound[name] == top[name]}

    def full(self, name: str) -> str:
        """The name of an outside API that a dotted name of this file stands for; itself where it stands for none."""
        head, dot, rest = name.partition(".")
        return f"{self.imported[head][0]}{dot}{rest}" if head in self.imported else name

    def spell(self, full: str, place: Place) -> tuple[str, str]:
        """How to write an outside name at a place, and the module that must be imported for it (empty where none must).

        Raises NoFixError where its module's name stands for something else.
        """
        for name, (target, line) in self.imported.items():
            if target == full and line < place.line:
                return name, ""
        modules = [(target, name) for name, (target, line) in self.imported.items() if line < place.line]
        for target, name in sorted(modules, key=lambda each: -len(each[0])):
            if full.startswith(f"{target}."):
                return name + full[len(target) :], ""
        module = full.partition(".")[0]
        if module in self.bound:
            raise NoFixError(f"{module} stands for something else in this file")
        return full, module

    def importing(self, module: str) -> Span:
        """The import of a module, after the file's first imports."""
        last = 0
        for index, statement in enumerate(self.tree.body):
            docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not docstring and not isinstance(statement, (ast.Import, ast.ImportFrom)):
                break
            last = statement.end_lineno or statement.lineno
        ends = [match.end() for match in NEWLINE.finditer(self.text)]
        first = NEWLINE.search(self.text)
        newline = first[0] if first is not None else "\n"
        if last > len(ends):
            raise NoFixError("nothing follows the imports")
        if not last:  # comments at the top (an encoding among them) stay there
            last = (min(each.lineno for each in [*self.tree.body[:1]]) if self.tree.body else 1) - 1
        offset = ends[last - 1] if last else 0
        return offset, offset, f"import {module}{newline}"


def imports(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of what an import binds."""
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            if alias.asname:
                yield alias.asname, alias.name
            else:
                yield alias.name.partition(".")[0], alias.name.partition(".")[0]
        elif not statement.level and statement.module:
            yield alias.asname or alias.name, f"{statement.module}.{alias.name}"


def bindings(tree: ast.AST) -> Iterator[str]:
    """Every name that is bound anywhere in a tree, once for each time."""
    for node in walk(tree):
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id
            case ast.arg():
                yield node.arg
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from bindings_of_import(node)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def bindings_of_import(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
