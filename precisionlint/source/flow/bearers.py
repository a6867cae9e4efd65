"""Whose weights a line casts, and whether the code of another file can be a part of that object.

An object is followed by names: to the assignments of its variable, to the calls that hand it to a function, to the attribute of its
object, and there to what makes it. A class or a function of the project holds what its file leads to by imports; one of an outside library
holds none of the project but what it is given. Where the way is lost, the object may be anything.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from precisionlint.patterns import regex
from precisionlint.source.parsing import Definition, FunctionDef, UnreadableError, walk
from precisionlint.source.project import Project

MOVES = frozenset(
    {
        "half",
        "bfloat16",
        "to",
        "convert_to_fp16",
        "cuda",
        "cpu",
        "train",
        "eval",
        "float",
        "double",
        "type",
        "requires_grad_",
        "apply",
        "share_memory",
    }
)
"""Methods of modules that return the module."""
BY_NAME = regex(rb"importlib|import_module|__import__|entry_point|[Rr]egistry|REGISTR|instantiate\w*\(")
"""What only a file holds that makes objects by their names."""
SETTING = regex(r"dtype|config|cfg|args$|opt(?:ion)?s?$|path|name")
"""Arguments that are no objects."""
FROZEN = r"\.(?:eval\(\)|requires_grad_\(False\))"
"""How an object is taken out of training."""
LOADS = frozenset({"from_pretrained", "from_config", "from_single_file", "load_from_checkpoint"})
"""Methods of classes that make an object of what is stored."""
HOPS = 12
"""So many names are followed one after the other."""


class Spot(Struct, frozen=True):
    """An expression's surroundings: its file, the functions and classes around it (the innermost first), and its line (0: any later one)."""

    path: Path
    around: tuple[Definition, ...] = ()
    line: int = 0

    @property
    def function(self) -> FunctionDef | None:
        return next((one for one in self.around if not isinstance(one, ast.ClassDef)), None)

    @property
    def outer(self) -> Spot:
        return Spot(self.path, self.around[1:])


class Cast(Struct, frozen=True):
    """An object that a line of a file casts to half; ``around``: the functions and classes there. ``loads``: it is read from what is stored,
    in that dtype, and its buffers as they are."""

    line: int
    node: ast.expr
    around: tuple[Definition, ...]
    loads: bool = False


class Bearers:
    """The objects of one project. ``leads``: whether a file leads to another by imports; ``importers``: who imports a file;
    ``text``: a file without its documentation; ``taken``: the file that a name of a package comes from."""

    def __init__(
        self,
        project: Project,
        leads: Callable[[Path, Path], bool],
        importers: Callable[[Path], list[Path]],
        text: Callable[[Path], bytes],
        taken: Callable[[Path, str], Path],
    ) -> None:
        self.project = project
        self.leads = leads
        self.importers = importers
        self.text = text
        self.taken = taken
        self._trees: dict[Path, ast.Module | None] = {}
        self._sets: dict[Path, Sets] = {}
        self._imported: dict[Path, dict[str, tuple[ast.Import | ast.ImportFrom, ast.alias]]] = {}
        self._answers: dict[tuple[Path, int, Path], bool] = {}
        self._by_name: dict[Path, bool] = {}

    def holds(self, cast: Cast, path: Path, near: Path) -> bool:
        """Whether what a file casts may hold code of the file ``near``."""
        key = (path, id(cast.node), near)
        if key not in self._answers:
            self._answers[key] = Following(self, near).part(cast.node, Spot(path, cast.around, cast.line))
        return self._answers[key]

    def is_frozen(self, cast: Cast, path: Path) -> bool:
        """Whether a file takes what it casts out of training."""
        object_ = re.escape(ast.unparse(cast.node))
        return re.search(rf"(?<![\w.]){object_}{FROZEN}", self.text(path).decode("utf-8", "replace")) is not None

    def tree(self, path: Path) -> ast.Module | None:
        if path not in self._trees:
            self._trees[path] = None
            data = self.project.read(path)
            if data is not None:
                with contextlib.suppress(UnreadableError, RecursionError):
                    self._trees[path] = self.project.syntax(path, data)
        return self._trees[path]

    def sets(self, path: Path, name: str) -> list[tuple[ast.expr, tuple[Definition, ...]]]:
        """What a file sets an attribute to, by its name: looked up once a file, since one object leads to many."""
        if path not in self._sets:
            tree = self.tree(path)
            self._sets[path] = attributes_set(tree) if tree is not None else {}
        return self._sets[path].get(name, [])

    def imported(self, name: str, path: Path) -> Path | str | None:
        """The file that a name of a file is imported from, the name of an outside library, or None for what is not imported."""
        if path not in self._imported:
            self._imported[path] = {}
            for node in walk(tree) if (tree := self.tree(path)) is not None else ():
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    for alias in node.names:
                        self._imported[path].setdefault(alias.asname or alias.name.partition(".")[0], (node, alias))
        if name not in self._imported[path]:
            return None
        node, alias = self._imported[path][name]
        if isinstance(node, ast.Import):
            return self.project.resolve(alias.name, 0, path) or alias.name
        target = self.project.resolve(node.module or "", node.level, path)
        if target is not None and target.name == "__init__.py":
            target = self.taken(target, alias.name)
        return target or (None if node.level else node.module)

    def by_name(self, path: Path) -> bool:
        """Whether a file makes objects by names that it is handed."""
        if path not in self._by_name:
            self._by_name[path] = BY_NAME.search(self.text(path)) is not None
        return self._by_name[path]


class Following:
    """One object followed to what it is made of; a name that leads back to itself adds nothing."""

    def __init__(self, bearers: Bearers, near: Path) -> None:
        self.bearers = bearers
        self.near = near
        self.seen: set[tuple[Path, str, int]] = set()

    def part(self, node: ast.expr | None, spot: Spot) -> bool:
        """Whether an expression's value may hold code of ``near``."""
        if isinstance(node, ast.Name):
            return not SETTING.search(node.id) and self.name(node.id, spot)
        if isinstance(node, ast.Attribute):
            return not SETTING.search(node.attr) and self.attribute(node, spot)
        if isinstance(node, ast.Call):
            return self.made(node, spot)
        if isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.NamedExpr)):
            return self.part(node.value, spot)
        if isinstance(node, ast.IfExp):
            return self.part(node.body, spot) or self.part(node.orelse, spot)
        if isinstance(node, (ast.BoolOp, ast.Tuple, ast.List)):
            return any(self.part(each, spot) for each in (node.values if isinstance(node, ast.BoolOp) else node.elts))
        return not isinstance(node, (ast.Constant, ast.JoinedStr))

    def file(self, path: Path) -> bool:
        """Whether what a file makes may hold code of ``near``: it leads there, or makes objects by names."""
        return self.bearers.leads(path, self.near) or self.bearers.by_name(path)

    # -- names

    def name(self, name: str, spot: Spot) -> bool:
        if name in ("self", "cls"):
            return self.file(spot.path) or self.bearers.leads(self.near, spot.path)
        tree = self.bearers.tree(spot.path)
        if tree is None or len(self.seen) > HOPS:
            return True
        scope = spot.around[0] if spot.around else tree
        key = (spot.path, f"{name}:{spot.line}", id(scope))
        if key in self.seen:
            return False
        self.seen.add(key)
        bindings = bound(scope, name, spot.line)
        given = [self.part(value, Spot(spot.path, spot.around, value.lineno)) for value in bindings]
        first = bindings[0].lineno if bindings else 0
        always = any(
            isinstance(each, ast.Assign) and each.lineno <= first <= (each.end_lineno or first) for each in scope.body
        )
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and name in parameters(scope) and not always:
            given.append(self.argument(scope, name, spot))
        if given:
            return any(given)
        if spot.around:
            return self.name(name, spot.outer)
        if any(isinstance(each, Definition) and each.name == name for each in walk(tree)):
            return self.file(spot.path)
        target = self.bearers.imported(name, spot.path)
        return target is None or (isinstance(target, Path) and self.file(target))

    def argument(self, function: FunctionDef, name: str, spot: Spot) -> bool:
        """Whether any call hands such an object to a parameter; where none is found, anybody may."""
        owner = spot.around[1] if len(spot.around) > 1 and isinstance(spot.around[1], ast.ClassDef) else None
        called = owner.name if owner is not None and function.name == "__init__" else function.name
        positions = parameters(function)
        position = positions.index(name) - (owner is not None and not is_static(function))
        handed = []
        for path in dict.fromkeys([spot.path, *self.bearers.importers(spot.path)]):
            if called.encode() not in (self.bearers.project.read(path) or b""):
                continue
            for call, around in calls_of(self.bearers.tree(path), called):
                value = keyword(call, name)
                if any(isinstance(each, ast.Starred) for each in call.args) or keyword(call, None) is not None:
                    return True
                if value is None and position < len(call.args):
                    value = call.args[position]
                handed.append(value is not None and self.part(value, Spot(path, around, call.lineno)))
        return any(handed) or not handed

    # -- attributes and calls

    def attribute(self, node: ast.Attribute, spot: Spot) -> bool:
        tree = self.bearers.tree(spot.path)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and tree is not None:
            key = (spot.path, f".{node.attr}", 0)
            if key in self.seen:
                return False
            self.seen.add(key)
            made = self.bearers.sets(spot.path, node.attr)
            spots = ((value, Spot(spot.path, around, value.lineno)) for value, around in made)
            return any(self.part(value, where) for value, where in spots) or not made
        return self.part(node.value, spot)

    def made(self, call: ast.Call, spot: Spot) -> bool:
        """Whether a call returns such an object: it makes one, or is handed one and may give it back."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in MOVES | LOADS:
            return self.part(call.func.value, spot)
        handed = [*call.args, *(each.value for each in call.keywords if not SETTING.search(each.arg or ""))]
        root: ast.expr = call.func
        while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name) or root.id == "super":
            return True
        outside = isinstance(self.bearers.imported(root.id, spot.path), str) and not any(
            bound(scope, root.id) for scope in spot.around
        )
        if outside or root.id in ("getattr", "list", "dict", "next", "iter", "zip", "enumerate", "sorted", "map"):
            return any(self.part(each, spot) for each in handed)
        if root.id == "self":
            return self.name("self", spot)
        return self.part(root, spot) or any(self.part(each, spot) for each in handed)


def calls_with_surroundings(
    node: ast.AST, around: tuple[Definition, ...] = ()
) -> Iterator[tuple[ast.Call, tuple[Definition, ...]]]:
    """All calls below a node, each with the functions and classes around it."""
    todo: list[tuple[ast.AST, tuple[Definition, ...]]] = [(node, around)]
    while todo:
        current, here = todo.pop()
        if isinstance(current, ast.Call):
            yield current, here
        inside = (current, *here) if isinstance(current, Definition) else here
        todo.extend((child, inside) for child in ast.iter_child_nodes(current))


def calls_of(tree: ast.Module | None, name: str) -> Iterator[tuple[ast.Call, tuple[Definition, ...]]]:
    """The calls of a function, a class or a method by its last name."""
    for call, around in calls_with_surroundings(tree) if tree is not None else ():
        func = call.func
        if name == (func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""):
            yield call, around


def own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, a class or a file, without those of the definitions in it."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, Definition):
            todo.extend(ast.iter_child_nodes(node))


def bound(scope: ast.Module | Definition, name: str, line: int = 0) -> list[ast.expr]:
    """What a variable of a scope is set to before a line: values, and what is looped over. A statement that always sets it comes first, and
    what stood before that is gone."""
    found: list[ast.expr] = []
    for statement in scope.body:
        if line and statement.lineno >= line:
            break
        values = list(bindings(statement, name))
        if line and values and isinstance(statement, ast.Assign):
            found = []
        found += values
    return found


def bindings(statement: ast.stmt, name: str) -> Iterator[ast.expr]:
    """What a statement, or one in it, sets a variable to."""
    for node in (statement, *own(statement)) if not isinstance(statement, Definition) else ():
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            targets, value = [node.target], node.iter
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets, value = [node.optional_vars], node.context_expr
        else:
            continue
        for target in targets:
            yield from unpacked(target, value, name)


def unpacked(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    """What a target sets a variable to: a value, the one at its place of several, or an element of it."""
    if isinstance(target, ast.Name):
        if target.id == name:
            yield value
    elif isinstance(target, (ast.Tuple, ast.List)):
        several = value.elts if isinstance(value, (ast.Tuple, ast.List)) else ()
        for index, each in enumerate(target.elts):
            element: ast.expr = ast.copy_location(ast.Subscript(value, ast.Constant(index)), value)
            yield from unpacked(each, several[index] if len(several) == len(target.elts) else element, name)
    elif isinstance(target, ast.Starred):
        yield from unpacked(target.value, value, name)


Sets = dict[str, list[tuple[ast.expr, tuple[Definition, ...]]]]


def attributes_set(tree: ast.Module) -> Sets:
    """Attribute -> what a file sets it to on any object, with what is around each."""
    found: Sets = {}
    todo: list[tuple[ast.AST, tuple[Definition, ...]]] = [(tree, ())]
    while todo:
        node, around = todo.pop()
        inside = (node, *around) if isinstance(node, Definition) else around
        todo.extend((child, inside) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in walk(target)]
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if node.value is not None:
            for name in {each.attr for each in targets if isinstance(each, ast.Attribute)}:
                found.setdefault(name, []).append((node.value, around))
    return found


def parameters(function: FunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def is_static(function: FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)


def keyword(call: ast.Call, name: str | None) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)
