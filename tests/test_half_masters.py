"""Copies of half weights that are half themselves are no masters."""

from pathlib import Path

import pytest

from precisionlint import check

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn


def train(loader, dtype):
"""
STEPS = """
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        for m, p in zip(masters, model.parameters()):
            m.grad = p.grad.to(m.dtype)
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(masters, model.parameters()):
                p.copy_(m)
        model.zero_grad()
"""
PROGRAM = (
    HEAD
    + """    model = nn.Linear(64, 64).cuda()
    {before}
    masters = [{copy} for p in model.parameters()]
    {after}
"""
    + STEPS
)
HALF = "model.bfloat16()"


@pytest.mark.parametrize(
    ("copy", "before", "after", "told"),
    [
        ("p.detach().clone()", HALF, "pass", True),
        ("p.data.clone().requires_grad_()", HALF, "pass", True),
        ("nn.Parameter(p.detach().clone())", HALF, "pass", True),
        ("p.detach().clone().float()", HALF, "pass", False),
        ("p.float().detach().clone()", HALF, "pass", False),
        ("p.detach().clone().to(dtype)", HALF, "pass", False),
        ("p.detach().clone()", "pass", HALF, False),  # made while the weights were in fp32
    ],
)
def test_masters_in_half(tmp_path: Path, copy: str, before: str, after: str, told: bool) -> None:
    (tmp_path / "a.py").write_text(PROGRAM.format(copy=copy, before=before, after=after))
    found = [
        (each.rule, each.confidence) for each in check([str(tmp_path / "a.py")]).findings if each.severity != "info"
    ]
    assert found == [("bf16-only-weights", "certain")] * told


LOOPED = (
    HEAD
    + """    model = nn.Linear(64, 64).cuda().bfloat16()
    masters = []
    for p in model.parameters():
        m = p.detach().clone()
        {then}
        masters.append(m)
"""
    + STEPS
)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("pass", True),
        ("m.data = m.data.bfloat16()", True),
        ("m.data = m.data.float()", False),
        ("m.data = m.float()", False),
        ("m.data = m.data.to(dtype)", False),
    ],
)
def test_masters_whose_data_is_widened(tmp_path: Path, then: str, told: bool) -> None:
    (tmp_path / "a.py").write_text(LOOPED.format(then=then))
    found = [each.rule for each in check([str(tmp_path / "a.py")]).findings if each.severity != "info"]
    assert found == ["bf16-only-weights"] * told
