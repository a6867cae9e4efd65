"""Names that a star import brings from a file of the project, whatever else is imported beside it."""

from pathlib import Path

import pytest

from precisionlint import check

COMMON = """
import torch
from torch import nn

HALF = torch.bfloat16
WIDE = torch.float32
scaler = torch.amp.GradScaler("cuda")


def backward(loss):
    scaler.scale(loss).backward()


def positions(n, dtype):
    return torch.arange(n, dtype=dtype)
"""
TABLE = "\n\ndef table():\n    return torch.arange(4096, dtype={0})\n"
TRAIN = """

def train(loader):
    model = nn.Linear(64, 64).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        backward(loss)
        {0}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
IMPORTS = [
    "from common import *",
    "from common import *\nfrom nowhere import *",
    "from nowhere import *\nfrom common import *",
]


def rules(folder: Path, text: str) -> list[str]:
    (folder / "pyproject.toml").write_text("")
    (folder / "common.py").write_text(COMMON)
    (folder / "main.py").write_text(text)
    return [each.rule for each in check([str(folder / "main.py")]).findings if each.severity != "info"]


@pytest.mark.parametrize("imports", IMPORTS)
def test_star_imports_of_a_file_of_the_project(tmp_path: Path, imports: str) -> None:
    assert rules(tmp_path, imports + TABLE.format("HALF")) == ["half-arange"]
    assert rules(tmp_path, imports + TABLE.format("WIDE")) == []
    assert rules(tmp_path, imports + TRAIN.format("pass")) == ["clip-before-unscale"]
    assert rules(tmp_path, imports + TRAIN.format("scaler.unscale_(optimizer)")) == []
