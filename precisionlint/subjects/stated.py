"""What a setting of a Python file is where nobody gives it another value: the default of a dataclass's field, of a command-line argument
or of a parameter, and what a table holds under that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from precisionlint.source.parsing import DEFINITIONS, FunctionDef, walk
from precisionlint.subjects import File
from precisionlint.subjects.grown import literal
from precisionlint.subjects.names import last_name

DEPTH = 3


def stated(file: File, value: ast.expr, call: ast.AST, depth: int = DEPTH) -> list[ast.expr]:
    """The expressions that a setting stands for at a call, as the file gives them; none where it gives none."""
    if depth == 0:
        return []
    if isinstance(value, ast.Attribute):
        found = fields(file, value.attr) or arguments(file, value.attr)
    elif isinstance(value, ast.Subscript):
        return entries(file, value, call, depth)
    elif isinstance(value, ast.Name):
        found = held(file, value.id, call)
    else:
        return [value]
    return [each for one in found for each in stated(file, one, call, depth - 1) or [one]]


def fields(file: File, name: str) -> list[ast.expr]:
    """The default of the field of a class, unless every object of it is given another value; none where several classes have such a one."""
    classes = [(each, field_defaults(each)) for each in file.every(ast.ClassDef)]
    owners = [(owner, given) for owner, given in classes if name in given]
    return unless_given(file, owners[0][0].name, name, owners[0][1]) if len(owners) == 1 else []


def field_defaults(owner: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The fields of a class that are declared, with their defaults."""
    declared = [each for each in owner.body if isinstance(each, ast.AnnAssign)]
    return {each.target.id: each.value for each in declared if isinstance(each.target, ast.Name)}


def unless_given(file: File, called: str, name: str, defaults: dict[str, ast.expr | None]) -> list[ast.expr]:
    """The default of a parameter, unless each call gives another value; none where nobody can tell what one gives."""
    calls = [each for each in file.every(ast.Call) if last_name(each.func) == called]
    names = [each for each in defaults if each != "self"]
    given: list[ast.expr | None] = [] if calls else [defaults[name]]
    for call in calls:
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return []
        by_place = dict(zip(names, call.args, strict=False))
        given.append(next((k.value for k in call.keywords if k.arg == name), by_place.get(name, defaults[name])))
    return [each for each in given if each is not None]


def arguments(file: File, name: str) -> list[ast.expr]:
    """The default of a command-line argument."""
    for each in file.every(ast.Call):
        if last_name(each.func) == "add_argument":
            words = [word.value for word in each.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if name in (word.lstrip("-").replace("-", "_") for word in words):
                return [k.value for k in each.keywords if k.arg == "default"]
    return []


def held(file: File, name: str, at: ast.AST) -> list[ast.expr]:
    """What a name is set to: in the function around, by the default of its parameter unless each call gives another value, or at the top
    level of the file."""
    line = getattr(at, "lineno", 0)
    around = [each for each in file.functions if each.lineno <= line <= (each.end_lineno or 0)]
    for scope in sorted(around, key=lambda each: -each.lineno):
        found = [value for node in walk(scope) for value in values_of(node, name) if value.lineno < line]
        if found:
            return found
        if name in (given := defaults(scope)):
            return unless_given(file, scope.name, name, given)
    top = (node for node in file.syntax.body if not isinstance(node, DEFINITIONS))
    return [value for statement in top for node in walk(statement) for value in values_of(node, name)]


def values_of(node: ast.AST, name: str) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    else:
        return
    if node.value is not None and any(isinstance(each, ast.Name) and each.id == name for each in targets):
        yield node.value


def defaults(function: FunctionDef) -> dict[str, ast.expr | None]:
    """The parameters of a function with their defaults."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    values: list[ast.expr | None] = [None] * (len(named) - len(arguments.defaults)) + [*arguments.defaults]
    pairs = [*zip(named, values, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {argument.arg: default for argument, default in pairs}


def entries(file: File, value: ast.Subscript, call: ast.AST, depth: int) -> list[ast.expr]:
    """What a table holds under a key, all that it holds where nothing tells the key."""
    tables = [value.value] if literal(value.value) is not None else stated(file, value.value, call, depth - 1)
    keys = [value.slice] if isinstance(value.slice, ast.Constant) else stated(file, value.slice, call, depth - 1)
    wanted = {each.value for each in keys if isinstance(each, ast.Constant)}
    found = []
    for table in map(literal, tables):
        if table is not None:
            pairs = list(zip(table.keys, table.values, strict=True))
            chosen = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value in wanted]
            found += chosen or [v for _, v in pairs]
    return found
