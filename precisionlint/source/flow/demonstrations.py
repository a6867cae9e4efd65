"""Calls at the end of a file that show how it is used, on numbers that are made up: they tell nothing of the dtypes that others come with."""

from __future__ import annotations

from precisionlint.source.flow.heap import Function
from precisionlint.valueflow import NUMBER, Value, sources

MADE_UP = frozenset({"randn", "rand", "zeros", "ones", "randint", "constant"})
RANDOM = frozenset({"randn", "rand"})


def made_up(args: list[Value]) -> bool:
    """Whether a model is called on random numbers, as at the end of a file that shows how: nothing else than their dtypes is known."""
    return bool(args) and all(next(sources(each)).op in MADE_UP or each.dtypes == NUMBER for each in args)


def is_demonstration(function: Function, args: list[Value]) -> bool:
    """Whether the end of a library's file shows what its function does, on random numbers."""
    if b".backward(" in function.source.file.data or function.owner is not None:
        return False
    return any(next(sources(each)).op in RANDOM for each in args)
