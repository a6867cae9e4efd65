"""What syntax says by its words alone: tests of versions and dtypes, annotations, decorators, names that are called."""

from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from precisionlint.patterns import regex
from precisionlint.source.parsing import walk
from precisionlint.valueflow import BOOL, INT64, NUMBER, UNKNOWN, Dtypes, Value

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "remainder", ast.Pow: "pow",
    ast.MatMult: "matmul", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.LShift: "lshift", ast.RShift: "rshift",
}  # fmt: skip
VERSION = regex(r"version|hasattr|torch_|_torch|requires", re.I)
"""What a test of a version, or of what a module has, is called."""
NO_TENSOR = frozenset(
    {
        "constant",
        "external",
        "function",
        "class",
        "instance",
        "module",
        "file",
        "import",
        "builtin",
        "constructed",
        "region",
        "dict",
        "tuple",
        "many",
        "text",
        "dtype_of",
        "unknown",
    }
)
"""What of values is no tensor."""
NUMBERS_OF = regex(r"^(?:math|cmath|numpy|torch)\.(?:pi|e|tau|inf|nan)$")
"""Numbers that modules hold."""
CALLED = frozenset({"function", "instance", "module", "external", "constructed", "layer"})
"""What is called in the place of the other, where a branch or a setting chose one: a layer or the identity, one loss or another."""

HANDED = frozenset({"input", "index", "attribute", "unknown", "constructed", "layer"})
CRITERION = regex(
    r"criterion|^(?:self_)?loss(?:_?(?:fn|func|fct|function))?$|_loss_(?:fn|func|fct|function)$|^loss_[a-z]\w*$"
    r"|^(?!comp|get|calc|upd|log|red|back|scale|add|rec|acc|train|eval|val|print|gath|set)[a-z]\w*_loss$",
    re.I,
)
"""What a loss is called that is handed in or built elsewhere: only its name says that it is one."""
LACKING = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "TypeError"})
CAUGHT = frozenset(
    {
        "ImportError",
        "ModuleNotFoundError",
        "AttributeError",
        "TypeError",
        "RuntimeError",
        "NotImplementedError",
        "Exception",
        "BaseException",
    }
)
"""Errors by which a program finds out what its torch can do."""
TEST_FILE = regex(r"(?:^|/)(?:test_[^/]*|[^/]*_test|conftest)\.py$")
TEST_PATH = regex(rf"(?:^|/)tests?/|{TEST_FILE.pattern}")
"""A file of tests, and a file that lies among tests."""


def foreign(name: str, at: Any = None) -> Value:
    """A name of an outside API: a module, a function, a class, or a number such as ``math.pi``."""
    return Value("external", (), NUMBER if NUMBERS_OF.search(name) else UNKNOWN, at, name)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_decided(value: Value) -> bool:
    """Whether a value is a constant that is known; a size that was unpacked is a number that is not."""
    return value.op == "constant" and not (value.constant is None and value.dtypes == NUMBER)


def is_static(node: Any) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in getattr(node, "decorator_list", ()))


def is_property(node: Any) -> bool:
    return any("property" in ast_name(d) for d in getattr(node, "decorator_list", ()))


def is_property_setter(node: Any) -> bool:
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


def ast_name(node: ast.AST) -> str:
    """The last name in an expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return ast_name(node.value)
    return ""


ARRAYS = frozenset(
    {"minimum", "maximum", "clip", "concatenate", "stack", "array", "asarray", "where", "sum", "mean", "abs", "argsort"}
)
"""Functions of NumPy that are for arrays; ``np.sqrt(d)`` is for a number."""


@functools.lru_cache(maxsize=256)
def is_of_arrays(node: ast.AST) -> bool:
    """Whether a function computes with NumPy's arrays, and not with torch."""
    torch = arrays = False
    for each in walk(node):
        if isinstance(each, ast.Name):
            torch = torch or each.id in ("torch", "F")
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in ("np", "numpy"):
            arrays = arrays or each.attr in ARRAYS
    return arrays and not torch


PLAIN_TYPES = {"int": NUMBER, "float": NUMBER, "bool": BOOL, "str": UNKNOWN, "LongTensor": INT64, "FloatTensor": frozenset({"float32"}),
               "BoolTensor": BOOL, "IntTensor": frozenset({"int32"})}  # fmt: skip


def annotated(node: ast.expr | None) -> Dtypes | None:
    """What an annotation says of a parameter's dtype; None where it may be any tensor."""
    if isinstance(node, ast.BinOp):
        node = node.left
    if isinstance(node, ast.Subscript) and ast_name(node) == "Optional":
        node = node.slice
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return PLAIN_TYPES.get(node.value.rpartition(".")[2])
    # transformers writes torch.LongTensor for ids but torch.FloatTensor for any float.
    name = ast_name(node) if node is not None else ""
    return None if name == "FloatTensor" else PLAIN_TYPES.get(name)


WIDTHS = regex(
    r"^(?:num|n)_[a-z]\w*$|(?:^|_)dims?$|^dim_\w+$|^(?:n_?)?heads$|_(?:heads|channels|planes)$|^d_?model$|^d_[kv]$|^(?:in|out)_features$"
    r"|^(?:hidden|embed|patch|window|kernel|vocab|image|img|head|input|output|batch|block)_size$"
)
"""What an argument is called that says how many there are of something."""


def told_of(param: ast.arg) -> Dtypes | None:
    """What a parameter's annotation says of its dtype, or its name, where it is a number of something; None where it may be any tensor."""
    if param.annotation is None and WIDTHS.search(param.arg):
        return NUMBER
    return annotated(param.annotation)


def is_device(node: ast.expr | None) -> bool:
    """Whether an annotation says ``torch.device``."""
    return isinstance(node, ast.Attribute) and node.attr == "device" and ast_name(node.value) == "torch"


WIDE_GRADIENT = regex(
    r"assert [^\n]*\.grad(?:\.data)?\.(?:dtype (?:==|is) torch\.float(?:32)?\b|type\(\) == '(?:torch|\{\})\.cuda\.FloatTensor)"
)


@functools.lru_cache(maxsize=64)
def wants_wide_gradients(function: ast.AST) -> bool:
    """Whether a function raises where gradients are not fp32."""
    return any(
        isinstance(node, ast.Assert) and WIDE_GRADIENT.search(ast.unparse(node)) is not None for node in walk(function)
    )


class Asked(Struct, frozen=True):
    """What a test asks, by its words: for a version or for what a module has, and for the dtypes of which variables and attributes of its
    object."""

    version: bool
    dtypes_of: tuple[str, ...]


def words_of(test: ast.expr) -> Asked:
    nodes = [node for node in walk(test) if isinstance(node, (ast.Name, ast.Attribute))]
    holders = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "dtype"]
    dtypes_of = [
        ast.unparse(node)
        for node in holders
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
    ]
    return Asked(VERSION.search(" ".join(map(ast_name, nodes))) is not None, tuple(dtypes_of))


def catches(handler: ast.expr | None) -> bool:
    """Whether a handler of these errors catches what a torch without the name, or with it at odds, raises."""
    if isinstance(handler, ast.Tuple):
        return any(catches(one) for one in handler.elts)
    return handler is None or ast_name(handler) in CAUGHT


def outlives(frame: Frame, target: ast.expr) -> bool:
    """Whether what stands there outlives the call: an attribute of the object at hand, an entry of one, or one of a table around the function."""
    inner = target.value if isinstance(target, ast.Subscript) else target
    if isinstance(inner, ast.Name) and inner is not target:
        return inner.id not in frame.names and frame.depth == 0 and not frame.top
    return isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"


def attempts(node: Any) -> bool:
    """Whether a ``try`` is an attempt at what a torch may not have. One that goes on after errors of all kinds around a loop or a region, and
    has no other way to run them, is none."""
    if not any(catches(handler.type) for handler in node.handlers):
        return False
    missing = any(lacks(handler.type) for handler in node.handlers)
    return missing or not runs(node.body) or any("autocast" in ast.unparse(handler) for handler in node.handlers)


def lacks(handler: ast.expr | None) -> bool:
    """Whether a handler is written for a name or a parameter that is not there."""
    if isinstance(handler, ast.Tuple):
        return any(lacks(one) for one in handler.elts)
    return handler is not None and ast_name(handler) in LACKING


def runs(body: list[ast.stmt]) -> bool:
    """Whether statements hold a loop or a region."""
    return any(isinstance(inner, ast.For | ast.While | ast.With) for statement in body for inner in walk(statement))
