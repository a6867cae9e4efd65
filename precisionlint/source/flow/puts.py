"""What is put into a part of a tensor or a table: ``x[mask] = 0.0``, ``self.caches["key"] = x``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from precisionlint.source.flow import torch_calls
from precisionlint.source.flow.joins import either
from precisionlint.source.flow.words import ast_name, is_number
from precisionlint.valueflow import UNKNOWN, Value, find

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame


def put(frame: Frame, target: ast.Subscript, value: Value) -> None:
    """``target = value`` for a part of something."""
    held, key = frame.expr(target.value), frame.expr(target.slice)
    if is_number(value.constant) or (value.dtypes != UNKNOWN and held.op in torch_calls.FILLED):
        frame.made("index_put", (held, key, value), held.dtypes, target, ast_name(target.value))
    if isinstance(target.value, ast.Name) and is_number(value.constant) and is_test_of(key, held):
        frame.names[target.value.id] = Value("where", (key, value, held), held.dtypes, frame.at(target))
    entries = frame.entries(target.value)
    if entries is not None:
        cls, kept = entries
        cls.attributes[kept] = either([cls.attributes[kept], value]) if kept in cls.attributes else value


def is_test_of(key: Value, held: Value) -> bool:
    """Whether a mask tells what some of a tensor's own numbers are: ``scale == 0``, ``~isfinite(scale)``."""
    tested = find(key, lambda value: value.op == "test", limit=4)
    return tested is not None and find(tested, lambda value: value is held, limit=8) is not None
