"""Two results that a test compares: which of them is the other's reference, and whether both were computed, and in another way.

Where code only moves numbers, both sides hold the same bits however it is written; nothing is said of those.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.source.parsing import walk

COMPUTING = frozenset(
    {
        "matmul", "mm", "bmm", "addmm", "linear", "einsum", "softmax", "log_softmax", "layer_norm", "rms_norm", "sum", "mean", "cumsum", "norm",
        "conv1d", "conv2d", "cross_entropy", "scaled_dot_product_attention", "logsumexp", "baddbmm", "dot", "var", "std", "prod",
    }
)  # fmt: skip
"""Functions of torch that add many terms up."""
MOVING = frozenset(
    {
        "gather", "index_select", "take", "cat", "stack", "chunk", "split", "roll", "flip", "pad", "as_strided", "repeat_interleave", "tile",
        "squeeze", "unsqueeze", "reshape", "transpose", "permute", "movedim", "clone", "narrow", "masked_select", "diagonal", "unfold",
        "where", "masked_fill", "maximum", "minimum", "relu",
    }
)  # fmt: skip
"""Functions of torch that hand numbers on as they are."""
MOVES = regex(
    r"gather|scatter|copy|clone|permut|transpos|pack|load|sav(?:e|ing)|cache|index|select|slic|pad|order|shuffle|sort|top_?k|dispatch|"
    r"to_?all|a2a|send|recv|broadcast|(?:con)?cat(?:_|$)|stack|split|chunk|quant|cast|convert|repeat|roll|flip|mask|fill|round|restor|view|swap|move|"
    r"merge|state|sync|wait|put|get|norm(?:alize)?_action",
    re.I,
)
"""What a function is called that may do no more than that."""
REFERENCE = regex(r"(?:^|_)(?:ref(?:erence)?|torch|eager|naive|slow|golden|native|pytorch)(?:_|$)", re.I)
"""What a function is called that computes what another is held to."""
EXPECTED = regex(
    r"(?:^|_)(?:ref(?:erence)?|expect(?:ed|ation)?|exp|gold(?:en)?|gt|truth|baseline|orig(?:inal)?|vanilla|unfused|eager|naive|slow|torch|pt)\d*(?:_|$)",
    re.I,
)
"""What a result is called that another is held to."""


GRADIENT = "backward"
"""What makes the gradient of a tensor, whatever was computed from it."""
MODEL = regex(r"model|module|layer|net|block|encoder", re.I)
"""What is called so, two things that were made of it wrap."""


class Tensor(Struct, frozen=True):
    """``dtype``: ``"bf16"``, ``"fp16"`` or ``"fp32"``; ``computed``: the half in which it was computed, also where it was widened since;
    ``op``: what computed it, nothing for an input, and ``by``: the thing that was called for it; ``parameter``: the test's parameter
    that decides; ``blank``: its memory holds nothing yet, so the next call that is handed it fills it."""

    dtype: str
    at: Place
    computed: str = ""
    op: str = ""
    parameter: str = ""
    guess: bool = False
    blank: bool = False
    by: str = ""


class Difference(Struct, frozen=True):
    """``result - reference``, or its size: the ``mean`` or the ``most`` of it, ``relative`` to something."""

    left: Tensor
    right: Tensor
    mean: bool = False
    most: bool = False
    relative: bool = False


Against = Literal["fp32", "half", "reference"]


class Comparison(Struct, frozen=True):
    """What is known around a comparison. ``names``: what the two sides are called; ``makers``: what made the local things that are
    called, by name; ``restores``: the test saves and loads, after which the bits are the same again."""

    names: Sequence[str]
    makers: Mapping[str, ast.Call]
    restores: bool

    def of(self, left: Tensor, right: Tensor) -> tuple[Tensor, Against] | None:
        """The result of the two that was computed in half, and what it is held to; None where they may have the same bits."""
        half = [each for each in (left, right) if each.computed]
        if len(half) == 1:
            (result,) = half
            return (result, "fp32") if (right if result is left else left).op else None
        # By which op a gradient was made is not known, but by two where one is the reference.
        if len(half) == 2 and left.op == right.op == GRADIENT:
            return (left, "reference") if self.one_expected and not self.restores else None
        if len(half) != 2 or left.op == right.op:
            return None
        result = left if left.op not in COMPUTING and left.op != "@" else right
        if {left.op, right.op} & {"@", *COMPUTING}:
            return result, "half"
        if bool(REFERENCE.search(left.op)) is not bool(REFERENCE.search(right.op)):
            return None if self.restores else (result, "reference")
        return (result, "reference") if self.one_expected and self.in_two_ways(left, right) else None

    @property
    def one_expected(self) -> bool:
        """Whether one of the two is called what the other is held to."""
        return bool(EXPECTED.search(self.names[0])) is not bool(EXPECTED.search(self.names[1]))

    def in_two_ways(self, left: Tensor, right: Tensor) -> bool:
        """Whether the two things that were called compute, and are not one thing, or one in the other."""
        one, other = left.op, right.op
        if left.by and (left.by in (right.by, other) or right.by == one):
            return False
        if MOVES.search(one) or MOVES.search(other) or "arithmetic" in (one, other):
            return False
        made = self.makers.get(one), self.makers.get(other)
        words = [_words(each) for each in made]
        if other in words[0] or one in words[1]:
            return False
        if made[0] is None or made[1] is None:
            return not self.restores
        shared = any(map(MODEL.search, words[0] & words[1]))
        return not shared and ast.unparse(made[0].func) != ast.unparse(made[1].func)


def called_by(node: ast.expr) -> str:
    """The name at the root of ``out``, ``out[0]`` and ``out.float()``."""
    while True:
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        else:
            return node.id if isinstance(node, ast.Name) else ""


def innermost(call: ast.Call) -> ast.Call:
    """``Model(width)`` of ``Model(width).to(device).eval()``."""
    while isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        call = call.func.value
    return call


def _words(call: ast.Call | None) -> set[str]:
    """The names that a call is handed."""
    if call is None:
        return set()
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {name.id for each in given for name in walk(each) if isinstance(name, ast.Name)}
