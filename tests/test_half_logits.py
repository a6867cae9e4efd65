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
        ({"given": ".double()"}, []),
        ({"given": ".to(torch.float64)"}, []),
        ({"given": ".to(torch.get_default_dtype())"}, []),
        ({"teacher": "print(F.cross_entropy(model(args.x), args.y))"}, ["likely"]),
        ({"teacher": "first = model(args.x)", "logits": "first"}, []),
        ({"after": "with torch.no_grad():\n        print(F.cross_entropy(model(x), y))"}, ["likely"]),
        (
            {"after": "with torch.inference_mode():\n        last = model(x)\n    print(F.cross_entropy(last, y))"},
            ["likely"],
        ),
        ({"after": "with torch.enable_grad():\n        F.cross_entropy(model(x), y).backward()"}, ["likely", "likely"]),
        ({"after": "@torch.no_grad()\n    def accuracy():\n        return F.cross_entropy(model(x), y)"}, ["likely"]),
        (
            {"after": "@torch.inference_mode\n    def accuracy():\n        return F.cross_entropy(model(x), y)"},
            ["likely"],
        ),
    ],
)
def test_the_logits_of_a_model_that_is_half(tmp_path: Path, change: dict[str, str], told: list[str]) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.format(**(SOUND | change)))
    found = check([str(file)], select=["loss-on-half-logits"]).findings
    assert [each.confidence for each in found] == told
    assert [each.when for each in found] == (["args.half"] if "args" in change.get("cast", "") else [""] * len(told))


OF_A_CLASS = """
import torch
import torch.nn.functional as F
from torch import nn


class Trainer:
    def prepare(self, x, y):
        self.model = nn.Linear(64, 10)
        {before}
        self.model.half()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    {decorated}
    def step(self, x, y):
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
"""
QUIET = {"before": "pass", "decorated": ""}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, [16]),
        ({"before": "print(F.cross_entropy(self.model(x), y))"}, [16]),
        ({"decorated": "@torch.no_grad()"}, []),
    ],
)
def test_the_methods_of_a_class_have_no_order_but_that_of_their_own_lines(
    tmp_path: Path, change: dict[str, str], lines: list[int]
) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    file = tmp_path / "train.py"
    file.write_text(OF_A_CLASS.format(**(QUIET | change)))
    found = check([str(file)], select=["loss-on-half-logits"]).findings
    assert [(each.place.line, each.confidence) for each in found] == [(line, "likely") for line in lines]
