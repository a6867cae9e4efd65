"""Cross entropy of what a model gives that is half in the same file, and trained."""

from pathlib import Path

import pytest

from precisionlint import check

PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(F.relu(self.body(x))){given}


def train(loader, args):
    model = Net().cuda()
    {teacher}
    {cast}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x, y in loader:
        logits = model(x)
        loss = F.cross_entropy({logits}, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""
SOUND = {"given": "", "teacher": "pass", "cast": "model = model.bfloat16()", "logits": "logits", "after": "pass"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ["likely"]),
        ({"cast": "model.half()"}, ["likely"]),
        ({"logits": "model(x)"}, ["likely"]),
        ({"cast": "if args.half:\n        model.half()"}, ["likely"]),
        ({"logits": "logits.float()"}, []),
        ({"given": ".float()"}, []),
        ({"given": ".to(torch.float32)"}, []),
        ({"cast": "pass", "teacher": "teacher = Net().cuda().half()"}, []),
        ({"cast": "pass", "after": "model.half()"}, []),
    ],
)
def test_the_logits_of_a_model_that_is_half(tmp_path: Path, change: dict[str, str], told: list[str]) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.format(**(SOUND | change)))
    found = check([str(file)], select=["loss-on-half-logits"]).findings
    assert [each.confidence for each in found] == told
    assert [each.when for each in found] == (["args.half"] if "args" in change.get("cast", "") else [""] * len(told))
