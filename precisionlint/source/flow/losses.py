"""Losses that other libraries compute, known by their names alone: whether they widen what they are given, nobody here knows."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from precisionlint.valueflow import UNKNOWN, Value

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

LOSS = re.compile(r"(?:^|[._])loss(?:_|$)")
PREDICTED = frozenset({"layer", "linear", "attribute"})
"""What may be the output of a model."""


def outside_loss(frame: Frame, name: str, args: list[Value], options: dict[str, Value], node: ast.Call) -> None:
    """Tells of a call of an outside function, if its name says that it computes a loss and it is given what a layer made. (What torch
    does with dtypes in its own is known.)"""
    given = [*args, *options.values()]
    predicted = next((part for part in given if part.op in PREDICTED), None)
    if predicted is not None and LOSS.search(name) and not name.startswith("torch."):
        frame.made("criterion", [predicted, *given], UNKNOWN, node, name.rpartition(".")[2], options)
