"""An audited step changes nothing: weights, buffers, gradients, optimizer, scaler and random state equal a plain
step's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precisionlint

State = dict[str, Any]
Step = Callable[[bool], State]


class Mixed(nn.Module):
    """Convolution, batch norm, dropout, attention, an embedding whose rows repeat, a recomputed block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x.cumsum(1).softmax(-1))


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "adamw-for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3),
    }


def train(optimizer_name: str, dtype: torch.dtype | None, weights: torch.dtype, audited: bool) -> State:
    """Two steps, the second of them audited or not; everything that is left of them."""
    torch.manual_seed(0)
    model = Mixed().to(weights)
    optimizer = optimizers()[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    tokens, targets = torch.randint(0, 11, (4, 7)), torch.randint(0, 5, (4, 7))
    average, norms = [each.detach().bfloat16().clone() for each in model.parameters()], []

    def loss_of() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        return loss

    def step() -> None:
        if optimizer_name == "lbfgs":
            optimizer.step(loss_of)
            return
        loss_of()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(sum((p.grad * p.grad).sum() for p in model.parameters()).sqrt().item())
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.mul_(0.999).add_(parameter, alpha=0.001)

    step()
    if audited:
        with precisionlint.audit(model, optimizer, scaler) as audit:
            step()
        assert not any("internal error" in note for note in audit.report.notes), audit.report.notes
    else:
        step()
    return {
        "model": model.state_dict(),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "random": torch.random.get_rng_state(),
        "average": average,
        "norms": norms,
    }


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nests of tensors differ in any bit."""
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return [] if same and torch.equal(left.nan_to_num(), right.nan_to_num()) else [path]
    if isinstance(left, dict):
        found = [path] if left.keys() != right.keys() else []
        return found + [each for key in left for each in differences(left[key], right.get(key), f"{path}.{key}")]
    if isinstance(left, list | tuple):
        pairs = enumerate(zip(left, right, strict=True))
        return [each for number, (a, b) in pairs for each in differences(a, b, f"{path}[{number}]")]
    return [] if left == right else [path]


RECIPES = ("fp32", "bf16-autocast", "fp16-scaler", "pure-bf16")
UNSUPPORTED = {("lbfgs", "fp16-scaler")}  # GradScaler takes no closure


@pytest.mark.parametrize(
    ("optimizer", "recipe"), [each for each in product(optimizers(), RECIPES) if each not in UNSUPPORTED]
)
def test_an_audited_step_equals_a_plain_one_bit_for_bit(optimizer: str, recipe: str):
    dtype = {"bf16-autocast": torch.bfloat16, "fp16-scaler": torch.float16}.get(recipe)
    weights = torch.bfloat16 if recipe == "pure-bf16" else torch.float32
    plain, audited = (train(optimizer, dtype, weights, each) for each in (False, True))
    assert differences(plain, audited) == []


def test_the_comparison_sees_one_bit():
    states = [train("sgd-momentum", None, torch.float32, False) for _ in range(2)]
    weight = states[1]["model"]["head.weight"]
    weight.view(torch.int32)[0, 0] ^= 1
    assert differences(*states) == [".model.head.weight"]


def test_an_op_whose_backward_differs_under_a_dispatch_mode_is_named():
    x = torch.rand(8, requires_grad=True)
    with precisionlint.audit() as audit:
        x.prod().backward()
    assert [note for note in audit.report.notes if "prod" in note and "another formula" in note]
    with precisionlint.audit() as audit:
        x.sum().backward()
    assert audit.report.notes == ()
