"""Parameters that are made in half by themselves, under an optimizer that keeps no fp32 copy."""

from pathlib import Path

import pytest

from precisionlint import check

BARE = """
import torch
from torch import nn


def train(loader):
    w = nn.Parameter({tensor})
    {more}
    optimizer = torch.optim.AdamW([w], lr=1e-5)
    for x, y in loader:
        loss = (x @ w - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
IN_A_MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, 64))
        self.w = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16){frozen})
        {then}

    def forward(self, x):
        return x @ self.w


def train(loader):
    net = Net(){cast}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    for x, y in loader:
        loss = (net(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def found(path: Path, text: str) -> list[tuple[str, str]]:
    path.write_text(text)
    report = check([str(path)])
    assert not report.errors
    return [(each.rule, each.confidence) for each in report.findings if each.severity != "info"]


@pytest.mark.parametrize(
    ("tensor", "more", "told"),
    [
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "pass", True),
        ("torch.randn(64, 64).to(torch.bfloat16)", "pass", True),
        ("data=torch.zeros(64, 64, dtype=torch.bfloat16)", "pass", True),
        ("torch.zeros(64, 64)", "pass", False),
        ("torch.zeros(64, 64, dtype=torch.float32)", "pass", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.requires_grad_(False)", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.requires_grad = False", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.data = w.data.float()", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.data = w.data.to(loader.dtype)", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.data = w.data.bfloat16()", True),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w = nn.Parameter(w.detach().float())", False),
    ],
)
def test_a_parameter_by_itself(tmp_path: Path, tensor: str, more: str, told: bool) -> None:
    assert found(tmp_path / "a.py", BARE.format(tensor=tensor, more=more)) == [("bf16-only-weights", "certain")] * told


@pytest.mark.parametrize(
    ("frozen", "cast", "told"), [("", "", True), ("", ".float()", False), (", requires_grad=False", "", False)]
)
def test_a_parameter_of_a_module(tmp_path: Path, frozen: str, cast: str, told: bool) -> None:
    hits = found(tmp_path / "a.py", IN_A_MODULE.format(frozen=frozen, cast=cast, then="pass"))
    assert hits == [("bf16-only-weights", "likely")] * told


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("self.w.data = self.w.data.float()", False),
        ("self.w = nn.Parameter(self.w.float())", False),
        ("self.w = nn.Parameter(torch.zeros(64, 64))", False),
        ("self.w.data = self.w.data.bfloat16()", True),
        ("self.w = nn.Parameter(self.w.to(torch.bfloat16))", True),
        ("self.scale = nn.Parameter(self.scale.float())", True),
    ],
)
def test_a_parameter_that_is_widened_or_replaced(tmp_path: Path, then: str, told: bool) -> None:
    hits = found(tmp_path / "a.py", IN_A_MODULE.format(frozen="", cast="", then=then))
    assert hits == [("bf16-only-weights", "likely")] * told
