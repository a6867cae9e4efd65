"""Running averages that are kept in half (EMA of weights): how much of an update moves nothing.

Known by what is computed: ``lerp_``, a decay and an addition (in place or not, singly or by lists), or the subtraction
of a part of the difference. What the update was to be is computed beside it in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.facts import SLOW
from precisionlint.trace.position import Position
from precisionlint.trace.recorder import Call, Watcher
from precisionlint.trace.storages import Storages

HALF = (torch.float16, torch.bfloat16)
LARGEST_STEP = 1.0 - SLOW + 1e-9
"""Up to which share of the difference an update is one of a slow average."""


class Average(Struct):
    """The updates of one line: of elements that were to move, how many did not."""

    dtype: torch.dtype
    rate: float
    meant: Tensor | int = 0
    """Elements that were to move."""
    lost: Tensor | int = 0
    """Those of them that did not."""


class Decayed(Struct, frozen=True):
    """A tensor that holds a decayed average, and that average where it is another tensor."""

    rate: float
    average: Tensor | None


class Averages:
    """The averages of one window, by the line that updates them."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self.found: dict[int, Average] = {}
        self._decayed: Storages[Decayed] = Storages()
        self._parts: Storages[float] = Storages()
        self._differences: Storages[bool] = Storages()

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that may be part of an average."""
        handler = HANDLERS.get(func._overloadpacket.__name__) if func.namespace == "aten" else None
        if handler is None:
            return None

        def watcher(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
            if call.phase in ("other", "forward") and not self.position.modules and is_half(args[0]):
                handler(self, args, kwargs, out, call)

        return watcher

    def stepped(self) -> None:
        """A step is over: what was half done is none."""
        self._decayed.clear()
        self._parts.clear()
        self._differences.clear()

    def lerp_(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        if isinstance(weight, float):
            for average, target in zip(listed(args[0]), listed(args[1]), strict=False):
                self._judge(average, weight * (target.float() - average.float()), weight, call)

    def mul_(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if isinstance(args[1], float) and 1.0 - LARGEST_STEP <= args[1] < 1.0:
            for each in listed(args[0]):
                self._decayed.put(each, Decayed(1.0 - args[1], None))

    def mul(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if not isinstance(args[1], float) or not isinstance(out, Tensor):
            return
        if 1.0 - LARGEST_STEP <= args[1] < 1.0 and call.phase == "other":  # else it may hold an activation for long
            self._decayed.put(out, Decayed(1.0 - args[1], args[0].detach()))
        elif 0.0 < args[1] <= LARGEST_STEP and self._differences.get(args[0]):
            self._parts.put(out, args[1])

    def add_(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        alpha = kwargs.get("alpha", 1.0)
        for each, other in zip(listed(args[0]), listed(args[1]), strict=False):
            known = self._decayed.pop(each)
            if known is not None and isinstance(other, Tensor):
                self._judge(each, alpha * other.float() - known.rate * each.float(), known.rate, call)

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        known = self._decayed.pop(args[0])
        if known is not None and known.average is not None and isinstance(args[1], Tensor):
            addend = kwargs.get("alpha", 1.0) * args[1].float()
            self._judge(known.average, addend - known.rate * known.average.float(), known.rate, call)

    def sub(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if isinstance(out, Tensor) and isinstance(args[1], Tensor) and args[1].shape == args[0].shape:
            self._differences.put(out, True)

    def sub_(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        part = self._parts.pop(args[1]) if isinstance(args[1], Tensor) else None
        if part is not None:
            self._judge(args[0], -args[1].float(), part, call)

    def _judge(self, average: Tensor, move: Tensor, rate: float, call: Call) -> None:
        """Whether such a move changes the average as it stands (what has just been lost is lost again)."""
        if not is_half(average) or not 0.0 < rate <= LARGEST_STEP or move.shape != average.shape:
            return
        meant = move != 0
        lost = meant & ((average.float() + move).to(average.dtype) == average)
        found = self.found.setdefault(call.origin, Average(average.dtype, rate))
        found.meant = found.meant + torch.count_nonzero(meant)
        found.lost = found.lost + torch.count_nonzero(lost)


HANDLERS = {
    "lerp_": Averages.lerp_,
    "_foreach_lerp_": Averages.lerp_,
    "mul_": Averages.mul_,
    "_foreach_mul_": Averages.mul_,
    "mul": Averages.mul,
    "add_": Averages.add_,
    "_foreach_add_": Averages.add_,
    "add": Averages.add,
    "sub": Averages.sub,
    "sub_": Averages.sub_,
}


def is_half(value: Any) -> bool:
    """Whether a tensor, or the first of a list, is half."""
    first = next(iter(listed(value)), None)
    return isinstance(first, Tensor) and first.dtype in HALF


def listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)
