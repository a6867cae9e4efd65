"""How trees are walked: as ``ast.walk`` does it, but for what says only how the node above is meant."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from precisionlint.source.parsing import walk

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "precisionlint").rglob("*.py"))
LEFT_OUT = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
EVERYTHING = '''
import os.path as path, sys
from . import a as b, c
from .module import *


@decorated(1, *given, key=2, **more)
class Thing(Base, metaclass=Meta):
    """Words."""

    field: int = 3
    bare: "str"


async def run(a, /, b=1, *args: int, c, d=4, **options) -> None:
    global g
    async with opened() as one, other():
        async for each in values:
            yield await each
    return (lambda x, *, y=1, z: x @ y)(-1, not 2, 1 if a else b)


def rest(self, *, first, second=2):
    nonlocal_ = {"a": 1, **options, 2: {3, *four}}
    (named := [x for row in table if row for x in row if x > 1 >= 0])
    try:
        del self.x[1:2, ..., ::3], first
        raise ValueError(f"{first!r:>{second}} {self=}") from None
    except (TypeError, KeyError) as error:
        assert error, "message"
    else:
        pass
    finally:
        while True:
            break
    match first:
        case {"key": Point(x=0, y=int() as y), **others} | [1, *tail] if y:
            x += 1
        case None | True | -1 | "text" | module.NAME:
            x = y = z = 2
        case _:
            (yield from others)
'''


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_walk_gives_the_nodes_that_the_standard_one_gives_in_its_order(path: Path) -> None:
    same_as_the_standard_one(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        EVERYTHING,
        pytest.param(
            "type Pair[T: int, *Ts, **P] = tuple[T, T]\n\n\ndef first[T](x: T) -> T:\n    return x\n",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of 3.12"),
        ),
        pytest.param(
            "text = t'{name!r:>{width}}'\n", marks=pytest.mark.skipif(sys.version_info < (3, 14), reason="of 3.14")
        ),
    ],
)
def test_a_walk_knows_every_kind_of_node(text: str) -> None:
    same_as_the_standard_one(text)


def same_as_the_standard_one(text: str) -> None:
    tree = ast.parse(text)
    assert walk(tree) == [node for node in ast.walk(tree) if not isinstance(node, LEFT_OUT)]


def test_a_walk_bears_fields_of_other_pythons() -> None:
    class Interpolation(ast.expr):  # as in 3.14: what stands between the braces is text beside the node
        _fields = ("value", "str", "format_spec")

    inner = ast.Name("x", ast.Load())
    node = Interpolation()
    node.value, node.str = inner, "x"
    assert walk(node) == [node, inner]
