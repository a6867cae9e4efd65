"""Gradients of half weights that a loop adds up: possible where the optimizer steps the weights themselves, which is told on its own."""

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""

LOOP = """
def train(loader, micro):
    model = nn.Linear(64, 10).to({dtype})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for turn, (x, y) in enumerate(loader):
        {first}
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        {then}
"""
NOW_AND_THEN = "if turn % micro == 0: optimizer.step(); optimizer.zero_grad()"

INNER = """
class Learner:
    def __init__(self, net, micro):
        self.net, self.micro = net.half(), micro
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def add(self, x, y):
        loss = F.cross_entropy(self.net(x).float(), y) / self.micro
        loss.backward()
        {after}

    def learn(self, batches):
        self.optimizer.zero_grad()
        for x, y in batches:
            self.add(x, y)
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("text", "many"),
    [
        (LOOP.format(dtype="torch.bfloat16", first="pass", then=NOW_AND_THEN), 1),
        (INNER.format(after="return loss.detach()"), 1),
        (LOOP.format(dtype="torch.float32", first="pass", then=NOW_AND_THEN), 0),
        (LOOP.format(dtype="torch.bfloat16", first="optimizer.zero_grad()", then="optimizer.step()"), 0),
        (LOOP.format(dtype="torch.bfloat16", first="pass", then="optimizer.step(); model.zero_grad()"), 0),
        (LOOP.format(dtype="torch.bfloat16", first="pass", then="finish(model, optimizer)"), 0),
        (INNER.format(after="self.optimizer.step(); self.optimizer.zero_grad()"), 0),
    ],
)
def test_sums_of_half_weights_that_are_stepped_themselves_are_possible(tmp_path: Path, text: str, many: int) -> None:
    path = tmp_path / "program.py"
    path.write_text(HEAD + textwrap.dedent(text))
    rule = {"half-gradient-accumulation"}
    assert not check([str(path)], select=rule, isolated=True).findings
    shown = check([str(path)], select=rule, min_confidence="possible", isolated=True).findings
    assert [(each.rule, each.confidence) for each in shown] == [("half-gradient-accumulation", "possible")] * many
