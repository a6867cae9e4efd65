"""What vanishes for being too small: gradients that the backward casts to fp16, and Adam's eps beside fp16 moments."""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor

from precisionlint.formats import FP16
from precisionlint.trace.host import has_values
from precisionlint.trace.ranges import Ranges
from precisionlint.trace.recorder import Call, Watcher

WIDER = (torch.float32, torch.bfloat16)


class Cast(Struct):
    """The casts of gradients to fp16 that belong to one line: what became 0 there."""

    ranges: Ranges = field(default_factory=Ranges)
    elements: Tensor | int = 0
    """Elements that were not 0, and those of them that became 0."""
    sums: Tensor | int = 0
    """The same by magnitude."""

    @property
    def shares(self) -> tuple[float, float]:
        """Of the elements that were not 0, and of the sum of their magnitudes, the share that became 0."""
        (whole, gone), (total, lost) = (torch.as_tensor(each).tolist() for each in (self.elements, self.sums))
        return (gone / whole if whole else 0.0), (lost / total if total else 0.0)

    def best(self) -> tuple[float, float]:
        """The factor that would bring the largest to half of fp16's maximum, and the share that is 0 even then."""
        record = self.ranges.record(None)
        rows = [] if record is None else record.formats
        found = next((each for each in rows if each.format == FP16.name and each.chosen == "best"), None)
        return (1.0, 0.0) if found is None else (found.scale, found.zero)


class Underflow:
    """The gradients of one window that were cast to fp16."""

    def __init__(self) -> None:
        self.casts: dict[int, Cast] = {}

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for a cast."""
        return self._cast if func is torch.ops.aten._to_copy.default else None

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        before = args[0]
        if (
            call.phase != "backward"
            or out.dtype is not torch.float16
            or before.dtype not in WIDER
            or not has_values(out)
        ):
            return
        cast = self.casts.setdefault(call.origin, Cast())
        cast.ranges.add(before)
        size, gone = before.abs().float(), (out == 0) & (before != 0)
        cast.elements = cast.elements + torch.stack([torch.count_nonzero(before), torch.count_nonzero(gone)])
        cast.sums = cast.sums + torch.stack([size.sum(), size.masked_fill(~gone, 0.0).sum()]).double()


class Epsilon(Struct, frozen=True):
    """An Adam whose eps is 0 in the dtype of its second moments."""

    eps: float
    moments: int
    zeros: int
    broken: int
    """Elements of the weights that are inf or NaN after the step."""


def of_adam(optimizer: torch.optim.Optimizer) -> Epsilon | None:
    """What a step of one of torch's Adams over fp16 weights came to; None where eps counts.

    A fused one computes in fp32 and is none of these.
    """
    eps, moments, zeros, broken = 0.0, 0, 0, 0
    for group in optimizer.param_groups:
        value = group.get("eps")
        if (
            group.get("fused")
            or not isinstance(value, float)
            or float(torch.tensor(value, dtype=torch.float16, device="cpu")) != 0.0
        ):
            continue
        for parameter in group["params"]:
            second = optimizer.state.get(parameter, {}).get("exp_avg_sq")
            if isinstance(second, Tensor) and second.dtype is torch.float16 and has_values(second):
                eps = value
                moments += second.numel()
                zeros += second.numel() - int(torch.count_nonzero(second))
                broken += parameter.numel() - int(torch.isfinite(parameter.detach()).sum())
    known = type(optimizer).__module__.startswith("torch.optim") and "Adam" in type(optimizer).__name__
    return Epsilon(eps, moments, zeros, broken) if known and zeros else None
