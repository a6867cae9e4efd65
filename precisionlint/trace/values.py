"""The first value that is not finite, by the op that made it from finite ones. Asked for only: it reads every result
of the step.

Masks are made of -inf on purpose, so ops that write given constants do not count. Past the first one nothing is looked
at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.trace.recorder import Call, Watcher

GIVEN = frozenset(
    {
        "masked_fill",
        "masked_fill_",
        "where",
        "full",
        "full_like",
        "new_full",
        "fill_",
        "fill",
        "scalar_tensor",
        "lift_fresh",
    }
    | {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "index_put",
        "index_put_",
        "copy_",
        "slice_scatter",
    }
    | {
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "detach",
        "alias",
        "clone",
        "select",
        "slice",
        "unsqueeze",
    }
)
"""Ops that put values where they are told to, or show the same ones again."""
PHASES = frozenset({"forward", "recompute", "backward", "optimizer"})


class NonFinite(Struct, frozen=True):
    """The first op whose result was not finite although its inputs were."""

    op: str
    call: Call
    dtype: torch.dtype
    what: str
    largest: float
    """The largest magnitude among the inputs."""


class Values:
    """The values of one window."""

    def __init__(self) -> None:
        self.first: NonFinite | None = None

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that computes."""
        if func.namespace != "aten" or func._overloadpacket.__name__ in GIVEN:
            return None
        return self._look

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if self.first is not None or call.phase not in PHASES:
            return
        bad = next((each for each in floating([out]) if not bool(torch.isfinite(each).all())), None)
        if bad is None:
            return
        name = func._overloadpacket.__name__
        inputs = list(floating([*(args[1:] if name.endswith("_") else args), *kwargs.values()]))
        if any(not bool(torch.isfinite(each).all()) for each in inputs):
            return
        largest = max((float(each.abs().max()) for each in inputs if each.numel()), default=0.0)
        self.first = NonFinite(name, call, bad.dtype, "NaN" if bool(torch.isnan(bad).any()) else "inf", largest)


def floating(values: Any) -> Iterator[Tensor]:
    """The floating tensors among values and the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, list | tuple):
            yield from floating(value)
