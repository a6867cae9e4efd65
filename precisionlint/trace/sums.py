"""Running sums of single numbers that are kept in half from step to step: a loss, a metric, a count of tokens.

A sum is known by its storage, or by the line that adds to its own earlier result. It runs on where an addition follows
one of an earlier step, or where it was written before the window and nothing in the window made or reset it.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.trace.dataflow import HALF
from precisionlint.trace.position import Position
from precisionlint.trace.recorder import Call, Watcher
from precisionlint.trace.storages import Storages

MAKERS = frozenset(
    {
        "zeros",
        "zeros_like",
        "new_zeros",
        "full",
        "full_like",
        "new_full",
        "scalar_tensor",
        "lift_fresh",
        "_to_copy",
        "clone",
        "sum",
        "mean",
    }
)
RESETS = frozenset({"zero_", "fill_", "copy_"})


class Running(Struct, frozen=True):
    """The last addition to a sum: the line, how many steps had been made before it, and whether it is known to run on."""

    origin: int
    step: int
    runs_on: bool


class Sums:
    """The sums of one window. ``found``: the lines that add, with the dtype that they add in."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self.found: dict[int, torch.dtype] = {}
        self._step = 0
        self._running: Storages[Running] = Storages()
        self._made: Storages[bool] = Storages()

    def stepped(self) -> None:
        """Another step begins."""
        self._step += 1

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that adds to a sum, makes or resets one."""
        if func.namespace != "aten":
            return None
        name = func._overloadpacket.__name__
        if name in MAKERS:
            return self._make
        if name in RESETS:
            return self._reset
        return {"add_": self._add_to, "add": self._add}.get(name)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if is_number(out):
            self._made.put(out, True)

    def _reset(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if is_number(args[0]):
            self._made.put(args[0], True)
            known = self._running.pop(args[0])
            if known is not None and known.runs_on:
                self.found.pop(known.origin, None)

    def _add_to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if is_number(args[0]) and self._outside(call):
            from_before = args[0]._version > 0 and not self._made.get(args[0])
            self._added(self._running.get(args[0]), args[0], from_before, call)

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if is_number(out) and is_number(args[0]) and self._outside(call):
            known = self._running.get(args[0])
            self._made.put(out, True)
            self._added(known if known is not None and known.origin == call.origin else None, out, False, call)

    def _added(self, known: Running | None, total: Tensor, from_before: bool, call: Call) -> None:
        runs_on = from_before if known is None else known.runs_on or known.step < self._step
        if runs_on:
            self.found[call.origin] = total.dtype
        self._running.put(total, Running(call.origin, self._step, runs_on))

    def _outside(self, call: Call) -> bool:
        return call.phase in ("forward", "other") and not self.position.modules


def is_number(value: Any) -> bool:
    """Whether it is a single number in half of which no gradient is taken."""
    return isinstance(value, Tensor) and value.dtype in HALF and value.numel() == 1 and not value.requires_grad
