"""Floating point operations of an op, from shapes: multiply and add count as two. Elementwise ops and reductions have
no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _mm(args: Any, kwargs: Any, out: Any) -> int:
    return int(2 * out.numel() * args[-1].shape[-2])


def _addmm(args: Any, kwargs: Any, out: Any) -> int:
    return int(2 * out.numel() * args[1].shape[-1])


OWN: dict[Any, Callable[..., int]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.addmm: _addmm,
    aten.baddbmm: _addmm,
}


def formula(func: Any) -> Callable[..., int] | None:
    """What counts the operations of an op's call, as ``f(args, kwargs, out)``; None where torch knows no formula
    either.
    """
    own = OWN.get(func._overloadpacket)
    if own is not None:
        return own
    if func.namespace != "aten" or ("conv" not in func.__name__ and "attention" not in func.__name__):
        return None
    from torch.utils.flop_counter import flop_registry

    registered = flop_registry.get(func._overloadpacket)
    if registered is None:
        return None
    return lambda args, kwargs, out: int(registered(*args, **kwargs, out_val=out))
