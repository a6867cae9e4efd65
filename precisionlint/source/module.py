"""One file of a project: its text, its outline, what is lowered of it when that is needed, and which of its functions can matter at all.

That is decided by the words that they and the functions they name contain: what holds none of them is never interpreted.
"""

from __future__ import annotations

import ast
import re
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.lower import lower_body, lower_module
from precisionlint.source.marks import MADE, MARKS, NEEDING, STRONG, TRIGGER, Marks
from precisionlint.source.outline import named_in, telling_names
from precisionlint.source.parsing import (
    DEFINITIONS,
    column,
    decode,
    lines_spanned,
    split_lines,
    walk,
    without_remarks,
    words_in,
)
from precisionlint.source.uses import models_used, scalers_idle, scalers_used, scales_compared

if TYPE_CHECKING:
    from precisionlint.source.project import Project

EVALUATION = regex(
    r"(?:^|_)(?:eval|evaluate|evaluation|validate|validation|valid|val|test|infer|inference|predict|generate|sample)(?:_|$)"
)
NO_GRAD = regex(r"\s*@[\w.]*(?:no_grad|inference_mode)")
TRAINS = regex(r"\bbackward\w*\(|\.step\(|unscale_|zero_grad|scaler|clip_grad|optim", re.I)
WEIGHTS = regex(r"parameters\(|state_dict\(|\.grad\b")
LEFT_HALF = regex(
    r"(?:^[ \t]*|:[ \t]+|;[ \t]*)(?:([\w.]*(?:[Mm]odel|[Nn]et))[ \t]*=[ \t]*\1|[\w.]+)(?:\.\w+\([^()\n]*\))*"
    r"\.(?:half\(\)|bfloat16\(\)|to\([^()\n]*(?:float16|half|dtype)[^()\n]*\))",
    re.M,
)
"""A statement that casts a model in place, which is still half when the function has ended."""
FILLS = frozenset({"append", "extend", "add", "update", "insert", "setdefault"})
"""The methods of a list, set or dict that put something into it."""
SMALL = 5
"""Functions of up to so many lines are always entered: getters and switches are what conditions are made of."""

BUILDING = Marks("requires_grad", ".half(", "float16", "caler", "optim", "autocast", "default_dtype", ".backward(")
DEFINED = regex(r"(?:async[\s\\]+)?(?:def|class)[\s\\]+(\w+)")
OF_PRECISION = Marks(
    "16", "half", "autocast", "scal", "fp8", "float8", "recision", "ccelerat", "eepspeed", "ightning",
    patterns={"amp": r"(?<![a-z])amp(?![a-z])"},
)  # fmt: skip
"""What no program goes without that computes in anything but fp32."""
OWN_OPS = Marks("custom_op", "autograd.Function", "triton", "torch.ops.", "autocast")


class ProjectModule:
    """One file of the project, parsed; what else is asked of it is made when it is first asked."""

    def __init__(self, project: Project, path: Path, name: str, data: bytes) -> None:
        self.project = project
        self.path = path
        self.name = name
        self.tree = project.syntax(path, data)
        self.text = decode(data)
        self.lines = split_lines(self.text)
        self.code = without_remarks(self.tree, self.lines)
        self.outline = project.outlined(path, self.tree, self.code)
        project.outlines[path] = self.outline
        self._words: dict[p.Function, frozenset[str]] = {}
        self._triggered: dict[p.Function, bool] = {}
        self._strong: dict[p.Function, bool] = {}
        self._trains: dict[p.Function, bool] = {}
        self._holds: dict[str, bool] = {}
        self._sets: dict[p.Function, list[str]] = {}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @cached_property
    def block(self) -> p.Block:
        """Its top level, lowered when it is first run."""
        return lower_module(self.tree)

    @cached_property
    def kept(self) -> frozenset[str]:
        return frozenset(telling_names(self.tree, self.code))

    @cached_property
    def scaler_names(self) -> set[str]:
        return scalers_used(self.text)

    @cached_property
    def compared_scales(self) -> frozenset[tuple[int, int]]:
        return scales_compared(self.tree)

    @cached_property
    def idle_scalers(self) -> frozenset[tuple[int, int]]:
        return scalers_idle(self.tree)

    @cached_property
    def model_names(self) -> set[str]:
        return models_used(self.text)

    @cached_property
    def speaks_of_precision(self) -> bool:
        return OF_PRECISION.found("\n".join(self.code))

    def body(self, function: p.Function) -> p.Block:
        return lower_body(function)

    def may_train(self) -> bool:
        """Whether anything in the file is strong, or leads to what is: else none of its programs can hold a fault."""
        code = "\n".join(self.code)
        if self.outline.stars or STRONG.found(code) or self.project.names_own(code, (0, len(code))):
            return True

        def reached(kind: str) -> bool:
            return any(self.project.reaches(self.path, name, kind) for name in sorted(self.outline.imports))

        return reached("strong") or any(
            (MARKS[kind].found(code) or reached(kind)) and (MARKS[other].found(self.text) or reached(other))
            for kind, other in NEEDING.items()
        )

    def words(self, function: p.Function) -> frozenset[str]:
        """Every word in a function's lines."""
        if function not in self._words:
            self._words[function] = words_in(self.source_of(function))
        return self._words[function]

    def source_of_class(self, definition: p.ClassDef) -> str:
        first, last = lines_spanned(definition.node)
        return "\n".join(self.code[first - 1 : last])

    def builds_precision(self, function: p.Function) -> bool:
        """Whether a module's ``__init__`` does more than put layers together, or its file holds ops that autocast may not know."""
        source = self.source_of(function)
        return (
            OWN_OPS.found(self.text) or BUILDING.found(source) or MADE.found(source) or self.reaches(function, "made")
        )

    def source_of(self, function: p.Function) -> str:
        if function.first_line:
            return "\n".join(self.code[function.first_line - 1 : function.last_line])
        span = self.span(function.node)
        assert span is not None
        first, start, last, end = span
        lines = self.lines[first - 1 : last]
        lines[-1] = lines[-1][: end - 1]
        return "\n".join([lines[0][start - 1 :], *lines[1:]])

    def reaches(self, function: p.Function, kind: str) -> bool:
        """Whether something that a function names reaches a mark of this kind."""
        if function.first_line:
            mine = self.named_in(function.first_line, function.last_line)
        else:
            mine = named_in(self.source_of(function)) & self.known_names
        return any(self.project.reaches(self.path, name, kind) for name in sorted(mine - {function.name}))

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins in the text of the code."""
        return [0, *accumulate(len(line) + 1 for line in self.code)]

    def named_in(self, first: int, last: int) -> frozenset[str]:
        """Which names of this file its lines mean, from the first to the last."""
        return self.outline.named_in(self.starts[first - 1], self.starts[last])

    @cached_property
    def rebound(self) -> frozenset[str]:
        """The globals of this file that its functions set."""
        if "global " not in self.text:
            return frozenset()
        return frozenset(name for node in walk(self.tree) if isinstance(node, ast.Global) for name in node.names)

    @cached_property
    def known_names(self) -> frozenset[str]:
        """What this file defines or imports."""
        return self.outline.names

    def sets(self, function: p.Function) -> list[str]:
        """The attributes of its object that a method sets, or fills."""
        if function not in self._sets:
            found: set[str] = set()
            for node in walk(function.node):
                if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in FILLS):
                    filled = isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store)
                    node = node.value
                else:
                    filled = False
                if isinstance(node, ast.Attribute) and (filled or isinstance(node.ctx, ast.Store)):
                    found.update({node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else ())
            self._sets[function] = sorted(found)
        return self._sets[function]

    def trains(self, function: p.Function) -> bool:
        """Whether a function's own text holds what training is made of."""
        if function not in self._trains:
            source = self.source_of(function)
            self._trains[function] = (
                STRONG.found(source)
                or self.project.names_own(source, (0, len(source)))
                or any(MARKS[kind].found(source) and self.is_beside(function, other) for kind, other in NEEDING.items())
            )
        return self._trains[function]

    def is_strong(self, function: p.Function) -> bool:
        """Whether a function can train: a backward, a step or a scaler is within its reach."""
        if function not in self._strong:
            self._strong[function] = (
                self.trains(function)
                or self.reaches(function, "strong")
                or any(
                    self.is_beside(function, other) and self.reaches(function, kind) for kind, other in NEEDING.items()
                )
            )
        return self._strong[function]

    def is_beside(self, function: p.Function, kind: str) -> bool:
        """Whether a function's file holds a mark of this kind, or what the function reaches does."""
        if kind not in self._holds:
            self._holds[kind] = MARKS[kind].found(self.text)
        return self._holds[kind] or self.reaches(function, kind)

    def is_relevant(self, function: p.Function) -> bool:
        """Whether a function's body is worth interpreting."""
        if function.first_line and function.last_line - function.first_line < SMALL:
            return True
        if function not in self._triggered:
            source = self.source_of(function)
            own = self.project.names_own(source, (0, len(source)))
            above = function.name == "__init__" and "super(" in source  # which makes what that of a class above does
            self._triggered[function] = own or above or TRIGGER.found(source)
            evaluates = self.evaluates(function)
            if evaluates or NO_GRAD.match(source):
                # What only evaluates trains nothing, whatever copies it casts; where none are recorded gradients are measured, weights averaged.
                changes = TRAINS.search(source) or LEFT_HALF.search(source)
                self._triggered[function] = bool(changes or (not evaluates and WEIGHTS.search(source)))
                if not self._triggered[function]:
                    return False
            self._triggered[function] = self._triggered[function] or self.reaches(function, "event")
        return self._triggered[function]

    def evaluates(self, function: p.Function) -> bool:
        """Whether a function evaluates, by its name or its file's."""
        return bool(EVALUATION.search(function.name) or EVALUATION.search(self.path.stem))

    def only_evaluates(self, function: p.Function) -> bool:
        """Whether it speaks of nothing besides that training does."""
        return self.evaluates(function) and not TRAINS.search(self.source_of(function))

    def span(self, node: ast.AST) -> tuple[int, int, int, int] | None:
        """Where a node stands: its first line and column, its last line and the column after it, columns in characters from 1. Of a
        def or class it is the name. None for a node that has no place of its own."""
        if not isinstance(node, (ast.expr, ast.stmt, ast.pattern, ast.ExceptHandler)):
            return None
        start = column(self.lines, node.lineno, node.col_offset)
        if isinstance(node, DEFINITIONS):
            ahead = "\n".join((self.lines[node.lineno - 1][start - 1 :], *self.lines[node.lineno : node.lineno + 2]))
            named = DEFINED.match(ahead)
            if named is not None:
                line = node.lineno + ahead.count("\n", 0, named.start(1))
                start = named.start(1) - ahead.rfind("\n", 0, named.start(1)) + (start - 1) * (line == node.lineno)
                return line, start, line, start + len(named[1])
        end = node.end_lineno or node.lineno
        return node.lineno, start, end, column(self.lines, end, node.end_col_offset or 0)
