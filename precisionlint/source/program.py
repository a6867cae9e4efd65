"""The program tree: the few shapes that a Python program has once lowering is done with it.

Expressions are free of calls and of choices: calls, conditional expressions, ``and``/``or``, comprehensions and assignments inside
expressions are pulled out into instructions that leave their result in a temporary. What forks a path is
therefore always an instruction, and an expression has one value in one state. Every instruction keeps the ast node it came from:
its place, and what tells it from every other.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, TypeAlias

FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"

Slot = str | int
"""A local variable: a name of the program, or the number of a temporary."""


@dataclass(slots=True, eq=False)
class Const:
    value: Any


@dataclass(slots=True, eq=False)
class Name:
    slot: Slot


@dataclass(slots=True, eq=False)
class Attr:
    obj: Expr
    name: str
    at: Any = None


@dataclass(slots=True, eq=False)
class Index:
    obj: Expr
    key: Expr


@dataclass(slots=True, eq=False)
class Sequence:
    kind: str  # "tuple", "list" or "set"
    items: tuple[Expr, ...]
    at: Any


@dataclass(slots=True, eq=False)
class Mapping:
    items: tuple[tuple[Expr | None, Expr], ...]  # a key of None: ** of the value
    at: Any


@dataclass(slots=True, eq=False)
class Star:
    value: Expr


@dataclass(slots=True, eq=False)
class Binary:
    op: str
    left: Expr
    right: Expr


@dataclass(slots=True, eq=False)
class Unary:
    op: str
    value: Expr


@dataclass(slots=True, eq=False)
class Compare:
    op: str
    left: Expr
    right: Expr


@dataclass(slots=True, eq=False)
class Closure:
    """A function where it is written: a lambda, or the value of a ``def``."""

    function: Function


@dataclass(slots=True, eq=False)
class Opaque:
    """Something whose value is of no interest, made of these parts (an f-string, a slice)."""

    parts: tuple[Expr, ...]
    at: Any


Expr = Const | Name | Attr | Index | Sequence | Mapping | Star | Binary | Unary | Compare | Closure | Opaque


@dataclass(slots=True, eq=False)
class Param:
    name: str
    default: Expr | None
    kind: str  # "plain", "keyword", "*" or "**"
    annotation: Expr | None = None


@dataclass(slots=True, eq=False)
class Function:
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


@dataclass(slots=True, eq=False)
class ClassDef:
    name: str
    bases: tuple[Expr, ...]
    decorators: tuple[Expr, ...]
    body: Block
    node: ast.ClassDef
    methods: tuple[Function, ...] = ()


@dataclass(slots=True, eq=False)
class Block:
    code: list[Instr]
    kills: list[tuple[Slot, ...]] | None = None  # the slots that are dead after each instruction


@dataclass(slots=True, eq=False)
class Call:
    target: int
    func: Expr
    args: tuple[tuple[str | None, Expr], ...]  # keyword, None, "*" or "**"
    at: Any
    name: str = ""  # what its result is assigned to, for messages


@dataclass(slots=True, eq=False)
class Assign:
    target: Expr  # Name, Attr, Index, Sequence of those, or Star
    value: Expr
    at: Any
    annotation: Expr | None = None
    op: str = ""  # of an augmented assignment


@dataclass(slots=True, eq=False)
class Delete:
    target: Expr


@dataclass(slots=True, eq=False)
class If:
    test: Expr
    then: Block
    other: Block
    at: Any
    quiet: bool = False  # a conditional expression or and/or: no branch that a reader would name
    asked: bool = False  # and/or in a test: of its value only the truth matters
    filter: bool = False  # of a comprehension: what does not pass is not collected, and nothing else happens


@dataclass(slots=True, eq=False)
class For:
    target: Expr
    iter: Expr
    body: Block
    other: Block
    at: Any
    comprehension: bool = False


@dataclass(slots=True, eq=False)
class While:
    head: Block
    test: Expr
    body: Block
    other: Block
    at: Any


@dataclass(slots=True, eq=False)
class With:
    context: Expr
    target: Expr | None
    body: Block
    at: Any


@dataclass(slots=True, eq=False)
class Try:
    body: Block
    handlers: tuple[Block, ...]
    other: Block
    final: Block


@dataclass(slots=True, eq=False)
class Return:
    value: Expr


@dataclass(slots=True, eq=False)
class Raise:
    pass


@dataclass(slots=True, eq=False)
class Break:
    pass


@dataclass(slots=True, eq=False)
class Continue:
    pass


@dataclass(slots=True, eq=False)
class Define:
    function: Function


@dataclass(slots=True, eq=False)
class DefineClass:
    cls: ClassDef


@dataclass(slots=True, eq=False)
class Import:
    """``import a.b`` (name None, alias None: binds ``a``), ``import a.b as c``, ``from .a import b as c`` (name "b")."""

    module: str
    level: int
    name: str | None
    alias: str | None


@dataclass(slots=True, eq=False)
class Outer:
    """``global`` or ``nonlocal`` names."""

    names: tuple[str, ...]
    kind: str


@dataclass(slots=True, eq=False)
class Yield:
    target: int
    value: Expr
    at: Any


@dataclass(slots=True, eq=False)
class Begin:
    """An empty list in a temporary: what a comprehension collects into."""

    target: int
    kind: str
    at: Any


@dataclass(slots=True, eq=False)
class Collect:
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
