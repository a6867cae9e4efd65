"""What the audit's tests share: a small model, its data, and lines found by the mark that stands on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from precisionlint.audit_report import AuditReport


class Net(nn.Module):
    """Linear layers with a residual, a norm and a head: small, and every kind of op that a step is judged by."""

    def __init__(self, width: int = 8, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))  # <- a layer
        return self.head(self.norm(x))  # <- the head


def net(dtype: torch.dtype = torch.float32, **sizes: int) -> Net:
    torch.manual_seed(0)
    return Net(**sizes).to(dtype)


def batch(dtype: torch.dtype = torch.float32, width: int = 8, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, width, generator=generator)
    return x.to(dtype), torch.randint(0, classes, (16,), generator=generator)


def marked(function: Callable[..., object], mark: str = "<-") -> int:
    """The line of a function's source that carries ``# <-``."""
    source, first = inspect.getsourcelines(function)
    found = [number for number, line in enumerate(source, first) if f"# {mark}" in line]
    assert len(found) == 1, found
    return found[0]


def faults(report: AuditReport) -> list[tuple[str, int]]:
    """Rule and line of each finding, of an audit in which nothing went wrong."""
    assert not any("internal error" in note for note in report.notes), report.notes
    return [(finding.rule, finding.place.line) for finding in report.findings]
