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


BY_HAND = """
def train(model, loader, optimizer):
    sums = {made}
    for x, y in loader:
        F.cross_entropy(model(x).float(), y).backward()
        for total, p in zip(sums, model.parameters()):
            {add}
        optimizer.zero_grad()
"""
NAMED = """
def train(model, loader, optimizer):
    sums = {{name: torch.zeros_like(p, dtype={dtype}) for name, p in model.named_parameters()}}
    for x, y in loader:
        F.cross_entropy(model(x).float(), y).backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad / 8
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NAMED.format(dtype="torch.bfloat16"), True),
        (NAMED.format(dtype="torch.float32"), False),
        *(
            (BY_HAND.format(made=f"[torch.zeros_like(p{dtype}) for p in model.parameters()]", add=add), told)
            for dtype, add, told in [
                (", dtype=torch.bfloat16", "total.add_(p.grad)", True),
                (", dtype=torch.float16", "total += p.grad.detach()", True),
                (", dtype=torch.bfloat16", "total.mul_(0.9).add_(p.grad)", False),
                (", dtype=torch.bfloat16", "total.add_(p.detach())", False),
                (", dtype=torch.float32", "total.add_(p.grad)", False),
                ("", "total.add_(p.grad)", False),
            ]
        ),
    ],
)
def test_sums_that_a_program_makes_in_half(tmp_path: Path, text: str, told: bool) -> None:
    path = tmp_path / "program.py"
    path.write_text(HEAD + text)
    shown = check([str(path)], select={"half-gradient-accumulation"}, isolated=True).findings
    assert [(each.confidence, each.place.line) for each in shown] == [("likely", 7)] * told


OVER_RANKS = """
import torch.distributed as dist


def average(model):
    for p in model.parameters():
        grad = {grad}
        dist.{call}
        p.grad.copy_(grad)
"""


@pytest.mark.parametrize(
    ("grad", "call", "told"),
    [
        ("p.grad.half()", "all_reduce(grad)", True),
        ("p.grad.data.to(torch.bfloat16) / dist.get_world_size()", "all_reduce(grad, op=dist.ReduceOp.SUM)", True),
        ("p.grad.bfloat16()", "reduce(grad, 0)", True),
        ("p.grad.bfloat16()", "all_reduce(tensor=grad)", True),
        ("p.grad.bfloat16()", "broadcast(grad, 0)", False),
        ("p.grad.bfloat16().float()", "all_reduce(grad)", False),
        ("p.grad.float()", "all_reduce(grad)", False),
        ("p.grad", "all_reduce(grad)", False),
        ("p.detach().bfloat16()", "all_reduce(grad)", False),
    ],
)
def test_gradients_that_are_reduced_by_hand(tmp_path: Path, grad: str, call: str, told: bool) -> None:
    path = tmp_path / "program.py"
    path.write_text(HEAD + OVER_RANKS.format(grad=grad, call=call))
    shown = check([str(path)], select={"half-gradient-reduction"}, isolated=True).findings
    assert [(each.confidence, each.place.line) for each in shown] == [("likely", 12)] * told
