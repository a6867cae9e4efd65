"""Which models a file casts to half: where, and what object. A tensor is cast by the same methods; what tells them apart is what makes the
object, and, where nothing shows that, what it is called.

Read from the syntax of a file, once the words of a cast stand in its text. A name is followed to what it is set to, an attribute of
``self`` to what the class sets it to, a function of the project to what it returns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from precisionlint.patterns import regex
from precisionlint.source.flow.bearers import LOADS, MOVES, Bearers, Cast, Spot, bound, own, parameters
from precisionlint.source.parsing import DEFINITIONS, Definition, FunctionDef, walk
from precisionlint.subjects.names import last_name, spelled

SCREEN = regex(
    rb"torch\.(?:b?float16|half)\b|\.(?:half|bfloat16)\(\)|\.(?:to|type)\((?:[^()]|\([^()]*\)){0,300}?(?:16|half|dtype)"
    rb"|\btorch_dtype\s*=|\bfrom_(?:pretrained|config)\([^()]{0,1000}\bdtype\s*="
)
"""What a file holds that casts anything."""
NAMES = regex(
    r"(?:[Mm]odel|AutoModel\w*|[Nn]et|unet\w*|transformer|encoder\w*|decoder|backbone|generator|module|^self|^cls|critic|policy)s?$"
)
"""What a model is called."""
RESULTS = regex(
    r"(?:states?|out(?:put)?s?|feat(?:ure)?s?|emb\w*|masks?|ids|inputs?|len(?:gth)?s?|pred|attn|attention|cond)$"
)
"""What is called after a model, and is a tensor: ``encoder_hidden_states``."""
MAKERS = regex(
    r"^_?(?:build|make|create|get|load|init|initiali[sz]e|prepare|set_?up|define|construct|instantiate|new|wrap)_?"
)
"""How the name of a function begins that makes what it is called after."""
TENSORS = regex(r"Tensor$|^(?:Variable|Parameter|Buffer|Image|Generator|Batch\w*(?:Encoding|Feature))$")
"""Classes that are no modules, and are cast too."""
RECORDS = frozenset({"NamedTuple", "object", "TypedDict", "ABC", "Protocol", "Enum"})
"""Bases of which no class is a module."""
GIVE_BACK = frozenset(
    {"deepcopy", "copy", "compile", "script", "trace", "prepare", "prepare_model", "unwrap_model", "de_parallel", "weight_norm",
     "spectral_norm", "convert_sync_batchnorm", "get_peft_model", "modules", "children", "named_modules", "named_children", "values",
     "list", "tuple", "reversed", "enumerate", "zip", "items", "unwrap", "__new__"}
)  # fmt: skip
"""Functions that return the modules which they are given, or ones made of them."""
HALF = regex(r"(?:^|\.)b?(?:float16|half)$")
WIDE = regex(r"(?:^|\.)(?:float(?:32|64)?|double|u?int\d*|long|short|bool|complex\d+|Tensor)$|^None$")
DTYPE = regex(r"dtype$")
SPEAKS = regex(r"b?float16|\bhalf\b|dtype\b")
ASIDE = regex(r"save\w*\(|state_dict\(|export|onnx|\beval\(\)", re.I)
"""What says in the same line that a cast is done for a file, or to look at."""
SAVES = regex(r"\bsave(?:_\w+)?\(")
GOES_ON = regex(r"(?<!pre)train|backward|\bfit\(|\bstep\(|optim|loss", re.I)
"""What a function says that writes a model, and what one says that goes on with it."""
COPY = regex(r"copy\(", re.I)
METHODS = frozenset({"half", "bfloat16", "to", "type"})
"""Methods that cast."""
DEPTH = 6


class Casts:
    """The casts of one project's files."""

    def __init__(self, bearers: Bearers) -> None:
        self.bearers = bearers
        self._found: dict[Path, list[Cast]] = {}

    def of(self, path: Path) -> list[Cast]:
        """The casts of a file, in the order of their lines."""
        if path not in self._found:
            self._found[path] = []
            tree = self.bearers.tree(path) if SCREEN.search(self.bearers.text(path)) else None
            if tree is not None:
                self._found[path] = sorted(self.read(path, tree), key=lambda cast: cast.line)
        return self._found[path]

    def read(self, path: Path, tree: ast.Module) -> Iterator[Cast]:
        nodes = walk(tree)
        definitions = [node for node in nodes if isinstance(node, DEFINITIONS)]
        assigned = {id(node.value): node for node in nodes if isinstance(node, ast.Assign)}
        lines = self.bearers.text(path).decode("utf-8", "replace").split("\n")
        for call in nodes:
            if not isinstance(call, ast.Call) or not may_cast(call):
                continue
            line = call.func.end_lineno or call.lineno
            around = tuple(one for one in reversed(definitions) if one.lineno <= line <= (one.end_lineno or line))
            spot = Spot(path, around, call.lineno)
            is_cast = isinstance(call.func, ast.Attribute) and self.casts(call, call.func.attr, spot)
            if not is_cast and not self.loads(call, spot):
                continue
            text = "\n".join(lines[call.lineno - 1 : call.end_lineno])
            if ASIDE.search(text) or (COPY.search(text) and not self.is_trained(assigned.get(id(call)), spot)):
                continue
            if spot.function is not None and writes(spot.function, call):
                continue
            if not is_cast:
                yield Cast(line, call, around, loads=True)
            elif isinstance(call.func, ast.Attribute) and self.module(call.func.value, spot):
                yield Cast(line, call.func.value, around)

    def is_trained(self, statement: ast.Assign | None, spot: Spot) -> bool:
        """Whether a copy is one that trains: it has a name, and is stepped or goes forward before a backward in the same function."""
        target = spelled(statement.targets[0]) if statement is not None else ""
        scope = spot.function or self.bearers.tree(spot.path)
        if not target or scope is None:
            return False
        name = re.escape(target)
        text = ast.unparse(scope)
        trains = rf"(?<![\w.]){name}\.(?:train|parameters)\(" + (
            rf"|(?<![\w.]){name}\(" if ".backward(" in text else ""
        )
        return re.search(trains, text) is not None

    def casts(self, call: ast.Call, method: str, spot: Spot) -> bool:
        """Whether a method casts its object to half."""
        if method in ("half", "bfloat16"):
            return not call.args
        if method not in ("to", "type"):
            return False
        named = (each.value for each in call.keywords if each.arg == "dtype")
        return any(self.half(each, spot) for each in call.args) or any(self.half(e, spot) is not False for e in named)

    def loads(self, call: ast.Call, spot: Spot) -> bool:
        """Whether a call reads a model from a file in half: ``X.from_pretrained(…, torch_dtype=torch.bfloat16)``"""
        for each in call.keywords:
            if each.arg == "torch_dtype" and self.half(each.value, spot) is not False:
                return True
            if (
                each.arg == "dtype"
                and last_name(call.func) in LOADS
                and self.half(each.value, spot)
                and not isinstance(each.value, ast.Name)
            ):
                return True
        return False

    def half(self, node: ast.expr, spot: Spot, depth: int = 0) -> bool | None:
        """Whether an expression is, or may be, a half dtype; None where nothing tells."""
        if depth > DEPTH:
            return None
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return any_of(self.half(each, spot, depth + 1) for each in ways(node))
        if isinstance(node, ast.Dict):
            return any_of(self.half(each, spot, depth + 1) for each in node.values)
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = spelled(node)
            if HALF.search(name) and not name.startswith(("np.", "numpy.")):
                return True
            if WIDE.search(name):
                return False
            if spot.function is not None and spot.function.name == "forward" and name in parameters(spot.function):
                return False  # what a forward is asked for is the dtype of what it gives
            told = any_of(self.half(value, where, depth + 1) for value, where in self.values(node, spot))
            return (True if DTYPE.search(last_name(node)) else None) if told is None else told
        if isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Dict)):
            told = self.half(node.value, spot, depth + 1)
            if told is not None:
                return told
        if isinstance(node, ast.Constant):
            return bool(HALF.search(node.value)) if isinstance(node.value, str) else False
        return True if SPEAKS.search(ast.unparse(node)) else None

    def values(self, node: ast.expr, spot: Spot) -> list[tuple[ast.expr, Spot]]:
        """What a name, or an attribute of ``self``, is set to in its file."""
        tree = self.bearers.tree(spot.path)
        if tree is None:
            return []
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                return []
            return [
                (value, Spot(spot.path, around, value.lineno))
                for value, around in self.bearers.sets(spot.path, node.attr)
            ]
        if not isinstance(node, ast.Name):
            return []
        for depth in range(len(spot.around) + 1):
            scope = spot.around[depth] if depth < len(spot.around) else tree
            found = bound(scope, node.id, spot.line if depth == 0 else 0)
            if found:
                return [(value, Spot(spot.path, spot.around[depth:], value.lineno)) for value in found]
            if isinstance(scope, FunctionDef) and node.id in parameters(scope):
                return []
        return []

    def module(self, node: ast.expr, spot: Spot, depth: int = 0) -> bool | None:
        """Whether an expression's value is a module; None where nothing tells."""
        if depth > DEPTH:
            return None
        if isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node, ast.Attribute) and node.attr in ("data", "weight", "bias", "grad"):
                return False
            told = any_of(self.module(value, where, depth + 1) for value, where in self.values(node, spot))
            name = last_name(node)
            return (bool(NAMES.search(name) and not RESULTS.search(name)) or None) if told is None else told
        if isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.NamedExpr)):
            told = self.module(node.value, spot, depth + 1)
            return None if isinstance(node.value, ast.Call) and told and not makes(node.value) else told
        if isinstance(node, (ast.IfExp, ast.BoolOp, ast.List, ast.Tuple, ast.Dict)):
            return any_of(self.module(each, spot, depth + 1) for each in ways(node))
        if isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp)):
            return False
        return self.made(node, spot, depth) if isinstance(node, ast.Call) else None

    def made(self, call: ast.Call, spot: Spot, depth: int) -> bool | None:
        """Whether a call returns a module."""
        name = last_name(call.func)
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in LOADS:
            return True
        if of is not None and name in MOVES:
            return self.module(of, spot, depth + 1)
        if name in GIVE_BACK:
            handed = [*call.args, *([of] if of is not None and not call.args else [])]
            return any_of(self.module(each, spot, depth + 1) for each in handed)
        if makes(call):
            return not TENSORS.search(name) and self.is_module_class(call.func, spot)
        if (function := self.function(call.func, spot)) is not None:
            body, where = function
            returned = [node.value for node in own(body) if isinstance(node, ast.Return) and node.value is not None]
            told = any_of(self.module(each, Spot(where, (body,)), depth + 1) for each in returned)
            if told is not None:
                return told
        if MAKERS.search(name) and NAMES.search(name):
            return True
        called = self.module(call.func, spot, depth + 1) if call.args or call.keywords else None
        return False if called else None  # what a model gives

    def is_module_class(self, func: ast.expr, spot: Spot) -> bool:
        """Whether a class of the project has a base that a module can have; one of an outside library may be a module."""
        for each, _ in self.definitions(func, spot):
            if isinstance(each, ast.ClassDef):
                bases = {last_name(base) for base in each.bases}
                return bool(bases - RECORDS)
        return True

    def function(self, func: ast.expr, spot: Spot) -> tuple[FunctionDef, Path] | None:
        """The function of the project that is called, and its file."""
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self":
            owner = next((one for one in spot.around if isinstance(one, ast.ClassDef)), None)
            inside = owner.body if owner is not None else []
            return next(
                ((one, spot.path) for one in inside if isinstance(one, FunctionDef) and one.name == func.attr), None
            )
        return next(((one, path) for one, path in self.definitions(func, spot) if isinstance(one, FunctionDef)), None)

    def definitions(self, func: ast.expr, spot: Spot) -> Iterator[tuple[Definition, Path]]:
        """What a name, or one of an imported module, is defined as at the top level of a file of the project."""
        root, _, rest = spelled(func).partition(".")
        path: Path | str | None = spot.path if not rest else None
        for name, where in ((root, path), (rest or root, self.bearers.imported(root, spot.path) if root else None)):
            tree = self.bearers.tree(where) if isinstance(where, Path) else None
            for one in tree.body if tree is not None else ():
                if isinstance(one, Definition) and one.name == name:
                    assert isinstance(where, Path)
                    yield one, where


def ways(node: ast.expr) -> list[ast.expr]:
    """The values of which an expression is one, or holds all."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, (ast.BoolOp, ast.Dict)):
        return node.values
    return node.elts if isinstance(node, (ast.List, ast.Tuple)) else []


def any_of(answers: Iterator[bool | None]) -> bool | None:
    """True where one is, False where all are, None where nothing tells."""
    told = list(answers)
    return True if True in told else False if told and None not in told else None


def may_cast(call: ast.Call) -> bool:
    """Whether a call casts or loads something, by the names that it is written with."""
    return last_name(call.func) in METHODS or any(each.arg in ("dtype", "torch_dtype") for each in call.keywords)


def writes(function: FunctionDef, cast: ast.Call) -> bool:
    """Whether a function casts a model to write it, ``def to_hf(self, folder)``, and does nothing else with it."""
    if GOES_ON.search(ast.unparse(function)):
        return False
    later = (each for each in walk(function) if isinstance(each, ast.Call) and each.lineno > cast.lineno)
    return any(SAVES.match(f"{last_name(each.func)}(") for each in later)


def makes(call: ast.Call) -> bool:
    """Whether a class is called, by its name."""
    return last_name(call.func)[:1].isupper()
