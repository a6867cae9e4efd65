"""Numbers brought to the host, where they can be read and reading them changes nothing.

A tensor without values (meta, fake) has none. While a CUDA graph is being captured, reading one would end the capture,
and what is computed would become part of the graph: then nothing is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def capturing() -> bool:
    """Whether a CUDA graph is being captured. To ask that where nothing has used CUDA yet raises on a machine without one."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and bool(torch.cuda.is_current_stream_capturing())


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, as one that is meta or fake does not."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def number(value: Any) -> float | None:
    """A number, or the one that a tensor of one element holds; None where there is none to be read."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and has_values(value) and not capturing():
        return float(value)
    return None
