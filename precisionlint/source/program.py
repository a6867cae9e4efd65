"""The program tree: the few shapes that a Python program has once lowering is done with it.

Expressions are free of calls and of choices: calls, conditional expressions, ``and``/``or``, comprehensions and assignments inside
expressions are pulled out into instructions that leave their result in a temporary. What forks a path is
therefore always an instruction, and an expression has one value in one state. Every instruction keeps the ast node it came from:
its place, and what tells it from every other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeAlias

from msgspec import Struct

FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"

Slot = str | int
"""A local variable: a name of the program, or the number of a temporary."""


class Const(Struct, eq=False):
    value: Any


class Name(Struct, eq=False):
    slot: Slot


class Attr(Struct, eq=False):
    obj: Expr
    name: str
    at: Any = None


class Index(Struct, eq=False):
    obj: Expr
    key: Expr


class Sequence(Struct, eq=False):
    kind: str  # "tuple", "list" or "set"
    items: tuple[Expr, ...]
    at: Any


class Mapping(Struct, eq=False):
    items: tuple[tuple[Expr | None, Expr], ...]  # a key of None: ** of the value
    at: Any


class Star(Struct, eq=False):
    value: Expr


class Binary(Struct, eq=False):
    op: str
    left: Expr
    right: Expr


class Unary(Struct, eq=False):
    op: str
    value: Expr


class Compare(Struct, eq=False):
    op: str
    left: Expr
    right: Expr


class Closure(Struct, eq=False):
    """A function where it is written: a lambda, or the value of a ``def``."""

    function: Function


class Opaque(Struct, eq=False):
    """Something whose value is of no interest, made of these parts (an f-string, a slice)."""

    parts: tuple[Expr, ...]
    at: Any


Expr = Const | Name | Attr | Index | Sequence | Mapping | Star | Binary | Unary | Compare | Closure | Opaque


class Param(Struct, eq=False):
    name: str
    default: Expr | None
    kind: str  # "plain", "keyword", "*" or "**"
    annotation: Expr | None = None


class Function(Struct, eq=False):
    """A function whose body is lowered when it is first entered."""

    name: str
    params: tuple[Param, ...]
    decorators: tuple[Expr, ...]
    node: FunctionNode
    first_line: int  # decorators included; 0 for a lambda
    last_line: int
    body: Block | None = None
    generator: bool = False
    captured: frozenset[str] = frozenset()


class ClassDef(Struct, eq=False):
    name: str
    bases: tuple[Expr, ...]
    decorators: tuple[Expr, ...]
    body: Block
    node: ast.ClassDef
    methods: tuple[Function, ...] = ()


class Block(Struct, eq=False):
    code: list[Instr]
    kills: list[tuple[Slot, ...]] | None = None  # the slots that are dead after each instruction


class Call(Struct, eq=False):
    target: int
    func: Expr
    args: tuple[tuple[str | None, Expr], ...]  # keyword, None, "*" or "**"
    at: Any
    name: str = ""  # what its result is assigned to, for messages


class Assign(Struct, eq=False):
    target: Expr  # Name, Attr, Index, Sequence of those, or Star
    value: Expr
    at: Any
    annotation: Expr | None = None
    op: str = ""  # of an augmented assignment


class Delete(Struct, eq=False):
    target: Expr


class If(Struct, eq=False):
    test: Expr
    then: Block
    other: Block
    at: Any
    quiet: bool = False  # a conditional expression or and/or: no branch that a reader would name
    asked: bool = False  # and/or in a test: of its value only the truth matters
    filter: bool = False  # of a comprehension: what does not pass is not collected, and nothing else happens


class For(Struct, eq=False):
    target: Expr
    iter: Expr
    body: Block
    other: Block
    at: Any
    comprehension: bool = False


class While(Struct, eq=False):
    head: Block
    test: Expr
    body: Block
    other: Block
    at: Any


class With(Struct, eq=False):
    context: Expr
    target: Expr | None
    body: Block
    at: Any


class Try(Struct, eq=False):
    body: Block
    handlers: tuple[Block, ...]
    other: Block
    final: Block


class Return(Struct, eq=False):
    value: Expr


class Raise(Struct, eq=False):
    pass


class Break(Struct, eq=False):
    pass


class Continue(Struct, eq=False):
    pass


class Define(Struct, eq=False):
    function: Function


class DefineClass(Struct, eq=False):
    cls: ClassDef


class Import(Struct, eq=False):
    """``import a.b`` (name None, alias None: binds ``a``), ``import a.b as c``, ``from .a import b as c`` (name "b")."""

    module: str
    level: int
    name: str | None
    alias: str | None


class Outer(Struct, eq=False):
    """``global`` or ``nonlocal`` names."""

    names: tuple[str, ...]
    kind: str


class Yield(Struct, eq=False):
    target: int
    value: Expr
    at: Any


class Begin(Struct, eq=False):
    """An empty list in a temporary: what a comprehension collects into."""

    target: int
    kind: str
    at: Any


class Collect(Struct, eq=False):
    target: int
    value: Expr
    key: Expr | None = None


Instr = (
    Call
    | Assign
    | Delete
    | If
    | For
    | While
    | With
    | Try
    | Return
    | Raise
    | Break
    | Continue
    | Define
    | DefineClass
    | Import
    | Outer
    | Yield
    | Begin
    | Collect
)


def defined(block: Block) -> Iterator[Define | DefineClass]:
    """The functions and classes that a top level or a class body defines, those of its branches among them."""
    for instr in block.code:
        match instr:
            case Define() | DefineClass():
                yield instr
            case If():
                yield from chain(defined(instr.then), defined(instr.other))
            case Try():
                for part in (instr.body, *instr.handlers, instr.other, instr.final):
                    yield from defined(part)
            case With():
                yield from defined(instr.body)
