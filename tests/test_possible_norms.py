"""Norms, moments and averages in the dtype of what they are taken of: possible, and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

BROKEN = {
    "vectors of length one by hand": (
        "norm-without-upcast",
        """
def unit(directions, eps=1e-5):
    lengths = directions.pow(2).sum(dim=-1, keepdim=True)  # <-
    return directions * torch.rsqrt(lengths + eps)


def unit_rows(table):
    return table / torch.sqrt((table * table).sum(1, keepdim=True))  # <-
""",
    ),
    "a norm inside a region that is off": (
        "norm-without-upcast",
        """
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight  # <-
""",
    ),
    "a mean of squares as a sum over how many they are": (
        "norm-without-upcast",
        """
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x / torch.sqrt(torch.sum(x * x, dim=-1, keepdim=True) / x.shape[-1] + 1e-5)  # <-
        return self.gain * x
""",
    ),
    "squares of many tensors": (
        "half-gradient-norm",
        """
def balance(left, right):
    ratio = sum(each.square().sum() for each in left) / sum((each * each).sum() for each in right)  # <-
    return ratio**0.25
""",
    ),
    "the norm of all gradients by torch": (
        "half-gradient-norm",
        """
def limit(weights, most):
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    size = torch.nn.utils.get_total_norm(gradients, 2.0)  # <-
    torch.nn.utils.clip_grads_with_norm_(weights, most, size)
""",
    ),
    "moments by rows and columns": (
        "half-optimizer-state",
        """
class Factored(torch.optim.Optimizer):
    def prepare(self, p, state):
        grad = p.grad
        state["exp_avg_sq"] = [grad.new_zeros(grad.shape[:1]).detach(), grad.new_zeros(grad.shape[1:])]  # <-
        state["exp_avg"] = torch.zeros_like(p)


class Typed(torch.optim.Optimizer):
    def prepare(self, p, state):
        state["exp_avg_sq_row"] = torch.zeros(p.shape[:-1]).type_as(p)  # <-
        state["exp_avg_sq_col"] = torch.zeros(p.shape[-1], dtype=p.dtype, device=p.device)  # <-
""",
    ),
    "an average that is made in half": (
        "half-ema",
        """
from averages import EMAModel


def run(model, settings, loader, optimizer):
    weight_dtype = torch.float32
    if settings.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    ema = EMAModel(model.parameters(), decay=0.9999, dtype=weight_dtype)  # <-
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        ema.step(model.parameters())
""",
    ),
    "an average that wraps an optimizer": (
        "half-ema",
        """
class EMA(torch.optim.Optimizer):
    def __init__(self, inner, decay):
        self.inner, self.decay = inner, decay

    def step(self):
        self.inner.step()
        for p in self.inner.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.inner.state[p]
                state.setdefault("average", p.data.clone())
                state["average"].mul_(self.decay).add_(p.data, alpha=1 - self.decay)  # <-
""",
    ),
    "an average that is cast": (
        "half-ema",
        """
import copy


def run(model, settings, loader, optimizer, update_ema):
    dtype = torch.float16 if settings.fp16 else torch.float32
    model_ema = copy.deepcopy(model)
    model_ema.to(settings.device, dtype=dtype)  # <-
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        update_ema(model_ema, model)
""",
    ),
}

SOUND = {
    "a mean of squares in fp32 as a sum over how many they are": """
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        x = x / torch.sqrt(torch.sum(wide * wide, dim=-1, keepdim=True) / x.shape[-1] + 1e-5)
        return self.gain * x
""",
    "lengths in fp32": """
def unit(directions, eps=1e-5):
    wide = directions.float()
    return directions * torch.rsqrt(wide.pow(2).sum(dim=-1, keepdim=True) + eps)


def unit_rows(table):
    return table / torch.sqrt((table * table).sum(1, keepdim=True, dtype=torch.float32))


def scaled(weights, amounts):
    return weights / torch.sqrt(amounts.float().pow(2).sum(-1, keepdim=True))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            x = x.float()
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
""",
    "squares of many tensors in fp32": """
def balance(left, right):
    ratio = sum(each.square().sum(dtype=torch.float32) for each in left) / sum(each.double().square().sum() for each in right)
    return ratio**0.25


def count(groups):
    return sum(len(group) ** 2 for group in groups)


def size(gradients):
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms), 2.0)
""",
    "moments in fp32": """
class Factored(torch.optim.Optimizer):
    def prepare(self, p, state):
        grad = p.grad
        state["exp_avg_sq"] = [grad.new_zeros(grad.shape[:1], dtype=torch.float32), torch.zeros(grad.shape[1:])]
        state["exp_avg_sq_row"] = torch.zeros(p.shape[:-1]).type_as(state["exp_avg_sq"][0])
        state["exp_avg_sq_col"] = torch.zeros(p.shape[-1], dtype=torch.float32, device=p.device)
""",
    "an average in fp32 that wraps an optimizer, and an optimizer that is none": """
class EMA(torch.optim.Optimizer):
    def __init__(self, inner, decay):
        self.inner, self.decay = inner, decay

    def step(self):
        self.inner.step()
        for p in self.inner.param_groups[0]["params"]:
            state = self.inner.state[p]
            state.setdefault("average", p.data.clone().float())
            state["average"].mul_(self.decay).add_(p.data, alpha=1 - self.decay)


class Heavy(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["target_momentum"].mul_(self.decay).add_(p.grad, alpha=1 - self.decay)
            self.state[p]["residual"].add_(p.grad)
""",
    "averages in fp32, and copies that are looked at": """
import copy
from averages import EMAModel


def run(model, settings, loader, optimizer, update_ema):
    weight_dtype = torch.float16 if settings.fp16 else torch.float32
    model.text.to(settings.device, dtype=weight_dtype)
    model_ema = copy.deepcopy(model)
    model_ema.to(settings.device, dtype=torch.float32)
    ema = EMAModel(model.parameters(), decay=0.9999, dtype=torch.float32)
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        update_ema(model_ema, model)
        ema.step(model.parameters())


def log_validation(ema_model, settings, update_ema):
    weight_dtype = torch.float16
    ema_model.to(settings.device, dtype=weight_dtype)
    return ema_model(settings.prompt)
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, found = hits(tmp_path, body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert sorted({line for line, each in found if each == rule}) == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert hits(tmp_path, SOUND[name])[1] == []
