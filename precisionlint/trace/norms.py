"""A norm of all gradients that the program takes in half: its squares over- and underflow fp16, its sum stalls in bf16.

Squares of gradients are followed to the root that makes a norm of them; there it is held against the norm that fp64
gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from precisionlint.trace.dataflow import SHORT, Dataflow, Fault, Tag, is_half
from precisionlint.trace.recorder import Call, Watcher
from precisionlint.trace.registry import storage_number

OFF = 0.02
"""From which relative error on a norm is told."""
SQUARE, SUM = "square of a gradient", "sum of squares of gradients"
OUTSIDE = ("forward", "other", "clip")
WHY = {
    "fp16": "squares above 65504 are inf, and those of gradients below 2e-4 are 0",
    "bf16": "a term below half a step of the running sum is lost",
}


class Norms:
    """The norms of one window; its tags and faults are kept with those of the dataflow."""

    def __init__(self, flow: Dataflow, is_gradient: Callable[[Tensor], bool]) -> None:
        self.flow = flow
        self.is_gradient = is_gradient
        self._squared: dict[int, Tensor] = {}
        """The gradients that were squared in half since the last norm, by ``id``."""

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that may be part of a norm."""
        handler = HANDLERS.get(func._overloadpacket.__name__) if func.namespace == "aten" else None
        if handler is None or func is torch.ops.aten.pow.Tensor_Tensor:
            return None

        def watcher(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
            if call.phase in OUTSIDE and is_half(out):
                handler(self, args, out, call)

        return watcher

    def stepped(self) -> None:
        """The gradients are used up."""
        self._squared.clear()

    def square(self, args: tuple[Any, ...], out: Tensor, call: Call) -> None:
        if is_half(args[0]) and self.is_gradient(args[0]):
            self._squared[id(args[0])] = args[0]
            self.flow.tag(out, SQUARE, (call.origin, f"gradients are squared in {SHORT[out.dtype]}"))

    def power(self, args: tuple[Any, ...], out: Tensor, call: Call) -> None:
        if args[1] == 2:
            self.square(args, out, call)
        elif args[1] == 0.5:
            self.root(args, out, call)

    def product(self, args: tuple[Any, ...], out: Tensor, call: Call) -> None:
        if _same(args[0], args[1]):
            self.square(args, out, call)

    def sum(self, args: tuple[Any, ...], out: Tensor, call: Call) -> None:
        found = self._tag(args) if self._squared else None
        if found is not None:
            told = (call.origin, f"their sum is kept in {SHORT[out.dtype]}")
            self.flow.tag(out, SUM, found.stations[0], told)

    def _tag(self, args: tuple[Any, ...]) -> Tag | None:
        values = args[0] if isinstance(args[0], list | tuple) else args[:2]
        tags = (self.flow.tag_of(each, kind) for each in values for kind in (SQUARE, SUM))
        return next((each for each in tags if each is not None), None)

    def root(self, args: tuple[Any, ...], out: Tensor, call: Call) -> None:
        found = self.flow.tag_of(args[0], SUM)
        if found is None or out.numel() != 1:
            return
        exact = math.sqrt(sum(float(each.double().square().sum()) for each in self._squared.values()))
        said, name = float(out), SHORT[out.dtype]
        self._squared.clear()
        short = not said >= (1.0 - OFF) * exact or math.isinf(said)  # what was not seen squared can only add to it
        if math.isfinite(exact) and short:
            self.flow.found(
                Fault(
                    "half-gradient-norm",
                    found.stations[0][0],
                    f"a norm of gradients is taken in {name}: it says {said:.4g} where {exact:.4g} is due, since "
                    f"{WHY[name]}; square in fp32, or let torch.nn.utils.get_total_norm do it",
                    (*found.stations, (call.origin, "its root is taken as the norm")),
                )
            )


def _same(left: Any, right: Any) -> bool:
    """Whether two tensors show the same elements, as two slices of one do."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    views = [(storage_number(each), each.storage_offset(), each.shape, each.stride()) for each in (left, right)]
    return views[0] == views[1] and views[0][0] != 0


HANDLERS = {
    "pow": Norms.power,
    "square": Norms.square,
    "mul": Norms.product,
    "sum": Norms.sum,
    "stack": Norms.sum,
    "cat": Norms.sum,
    "add": Norms.sum,
    "add_": Norms.sum,
    "sqrt": Norms.root,
    "sqrt_": Norms.root,
}
