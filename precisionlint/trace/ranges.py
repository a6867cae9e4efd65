"""Where gradients fall in the range of each format, and which loss scale would keep most of them.

One histogram of exponents answers for every power-of-two scale. It is taken of the gradients that an optimizer is
about to use, with the loss scale divided out, of large ones from an even sample. What an fp16 backward has already
rounded to 0 shows as zeros alone.
"""

from __future__ import annotations

from math import log2
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from precisionlint.audit_report import GradientRange, RangeRecord
from precisionlint.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from precisionlint.trace.host import has_values
from precisionlint.trace.registry import local, parameters_of

FORMATS = (FP16, BF16, E4M3FN, E5M2)
BIAS = 127
SAMPLE = 2**18
"""How many elements of one gradient are looked at, at most."""


def _counts() -> Tensor:
    """Zeros, on the CPU and real whatever modes and default device are in force."""
    with _disable_current_modes():
        return torch.zeros(256, dtype=torch.int64, device="cpu")


class Ranges(Struct):
    """The histogram of one window: of each exponent of fp32 (field value), how many elements have it."""

    counts: Tensor = field(default_factory=_counts)
    zeros: int = 0
    elements: int = 0
    _seen: set[int] = field(default_factory=set)

    def before_step(self, optimizer: Any) -> None:
        """Adds an optimizer's gradients, each parameter's once. A fused one divides by the scale within its step."""
        pending = getattr(optimizer, "grad_scale", None)
        shift = 0 if pending is None else round(log2(float(pending)))
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self.add(local(parameter.grad), shift)

    def add(self, gradient: Tensor, shift: int = 0) -> None:
        """Adds the elements of a gradient, divided by ``2 ** shift``."""
        if gradient.is_sparse or not gradient.is_floating_point() or not gradient.numel() or not has_values(gradient):
            return
        flat = gradient.detach().flatten()
        flat = flat[:: -(-flat.numel() // SAMPLE)].float()
        field_ = (flat.view(torch.int32) >> 23) & 255
        counts = torch.bincount(field_, minlength=256).cpu()
        zeros = int(torch.count_nonzero(flat == 0))
        self.zeros += zeros
        self.elements += flat.numel()
        counts[0] -= zeros  # what is left has a subnormal exponent
        finite, other = counts[:255], counts[255:]
        moved = torch.zeros_like(counts)
        for exponent in finite.nonzero().flatten().tolist():
            moved[min(max(exponent - shift, 0), 254)] += finite[exponent]
        moved[255:] = other
        self.counts += moved

    def record(self, scale: float | None) -> GradientRange | None:
        """The shares for each format, at scale 1, at the program's own scale, and at the best one; None without
        gradients.
        """
        finite = self.counts[:255]
        total = int(finite.sum())
        if not total:
            return None
        exponents = (finite.nonzero().flatten() - BIAS).tolist()
        rows = []
        for target in FORMATS:
            shifts = {0: "none"}
            if target.exponent_bits < FP32.exponent_bits:  # with fp32's own range there is nothing to gain
                shifts[target.max_exponent - 1 - exponents[-1]] = "best"
            if scale is not None and scale > 0 and target is FP16:
                shifts.setdefault(round(log2(scale)), "the program's")
            for shift, name in sorted(shifts.items()):
                rows.append(RangeRecord(target.name, 2.0**shift, name, *self.shares(target, shift)))
        return GradientRange(self.elements, self.zeros, int(self.counts[255]), exponents[0], exponents[-1], tuple(rows))

    def shares(self, target: Format, shift: int) -> tuple[float, float, float]:
        """Of the finite elements that are not 0: which share becomes 0, subnormal, or infinite, at scale ``2 **
        shift``.

        Counted by whole exponents: of the topmost one, what lies beyond the format's maximum is not counted.
        """
        finite = self.counts[:255]
        total = int(finite.sum())
        vanish = round(log2(target.smallest)) - 1
        zero = self._between(-BIAS, vanish - shift)
        subnormal = self._between(vanish - shift, target.min_exponent - shift)
        over = self._between(target.max_exponent + 1 - shift, 256)
        return zero / total, subnormal / total, over / total

    def _between(self, low: int, high: int) -> int:
        """How many elements have an exponent from ``low`` to below ``high``."""
        first, last = max(low + BIAS, 0), min(high + BIAS, 255)
        return int(self.counts[first:last].sum()) if first < last else 0
