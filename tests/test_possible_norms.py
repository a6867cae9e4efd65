"""Norms, moments and averages in the dtype of what they are taken of: possible, and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

BROKEN = {
    "the root of a mean of squares": (
        "norm-without-upcast",
        """
def rmse(estimate, truth):
    error = (estimate - truth) ** 2
    return error.mean().sqrt().to(estimate.dtype)  # <-


def length(x):
    return torch.sqrt(torch.sum(x * x, dim=-1)).type_as(x)  # <-
""",
    ),
    "mean and deviation of rows": (
        "norm-without-upcast",
        """
class Norm(nn.Module):
    def forward(self, x):
        flat = x.reshape(x.shape[0], -1)
        mean = flat.mean(dim=1, keepdim=True).reshape(-1, 1, 1)
        spread = flat.var(dim=1, keepdim=True, unbiased=False).reshape(-1, 1, 1)  # <-
        return ((x - mean) / torch.sqrt(spread + 1e-6)).to(x.dtype)


def standard(x, eps=1e-5):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)  # <-
""",
    ),
    "a helper that is given what nobody read": (
        "norm-without-upcast",
        """
from backbones import features


def unit(x, eps=1e-5):
    return x / (torch.sqrt(torch.sum(x**2, dim=1, keepdim=True)) + eps)  # <-


class Perceptual(nn.Module):
    def forward(self, image, other):
        first, second = features(image), features(other)
        return (unit(first[0]) - unit(second[0])).abs().mean().to(image.dtype)
""",
    ),
    "norms by the length of a row": (
        "norm-without-upcast",
        """
class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale, self.gamma = dim**0.5, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return (F.normalize(x, dim=-1) * self.scale * self.gamma).to(x.dtype)  # <-


class ScaleNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.width, self.gain = dim, nn.Parameter(torch.ones(1))

    def forward(self, x):
        length = torch.norm(x, dim=-1, keepdim=True) * self.width**-0.5  # <-
        return x / length.clamp(min=1e-5) * self.gain
""",
    ),
    "sines of octaves": (
        "half-rope",
        """
def fourier(x, first, last):
    turns = 2 * torch.pi * torch.pow(2.0, torch.arange(first, last, dtype=x.dtype, device=x.device))
    angles = turns.repeat(x.shape[1])[None, :, None] * x.repeat_interleave(len(turns), dim=1)  # <-
    return torch.cat([x, torch.sin(angles), torch.cos(angles)], dim=1)


class Embedder(nn.Module):
    def __init__(self, octaves):
        super().__init__()
        self.register_buffer("freq_bands", 2.0 ** torch.linspace(0, octaves - 1, octaves))

    def forward(self, points):
        angles = (points[..., None] * self.freq_bands.to(points.dtype)).flatten(-2)  # <-
        return torch.cat([points, angles.sin(), angles.cos()], dim=-1)
""",
    ),
    "rows that others add up": (
        "half-scatter",
        """
from graphs.ops import scatter_reduce
from torch_scatter import scatter_mean


class Messages(nn.Module):
    def forward(self, x, weight, nodes, count):
        sent = (x * weight.to(x.dtype)).relu()
        pooled = scatter_mean(sent, nodes, dim=0, dim_size=count)  # <-
        return pooled + scatter_reduce(sent, nodes, dim=0, dim_size=count, reduce="sum")  # <-
""",
    ),
    "scores that others mask": (
        "mask-constant-overflow",
        """
from allennlp.nn import util


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.start = nn.Linear(width, 1)

    def forward(self, x, mask):
        logits = self.start(x).squeeze(-1)
        logits = util.replace_masked_values(logits, mask, -1e7)  # <-
        best = util.masked_max(x, mask.unsqueeze(-1), dim=1, fill=-1e32)  # <-
        return logits.to(x.dtype), best
""",
    ),
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
    "roots of squares in fp32, and of whole numbers": """
def rmse(estimate, truth):
    error = (estimate.float() - truth.float()) ** 2
    return error.mean().sqrt().to(estimate.dtype)


def spread(x, steps):
    side = torch.sqrt((torch.arange(steps) ** 2).sum())
    return x.dtype, side, torch.linalg.vector_norm(x, dtype=torch.float32)
""",
    "mean and deviation in fp32, and of a whole tensor": """
def standard(x, eps=1e-5):
    wide = x.float()
    return ((wide - wide.mean(-1, keepdim=True)) / (wide.std(-1, keepdim=True) + eps)).to(x.dtype)


def shifted(x, y):
    return (x - y.mean(-1, keepdim=True)).to(y.dtype) / x.std(-1, keepdim=True).float()
""",
    "a helper that is given what nobody read, in fp32": """
from backbones import features


def unit(x, eps=1e-5):
    return x / (torch.sqrt(torch.sum(x**2, dim=1, keepdim=True)) + eps)


class Perceptual(nn.Module):
    def forward(self, image):
        return unit(features(image)[0].float()).mean().to(image.dtype)
""",
    "norms by a length in fp32, and directions": """
class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5

    def forward(self, x):
        wide = x.float()
        return (wide / (wide.norm(dim=-1, keepdim=True) + 1e-5) * self.scale).to(x.dtype)


class Direction(nn.Module):
    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + 1e-4)
""",
    "sines of octaves in fp32": """
def fourier(x, first, last):
    turns = 2 * torch.pi * torch.pow(2.0, torch.arange(first, last, dtype=torch.float32, device=x.device))
    angles = turns.repeat(x.shape[1])[None, :, None] * x.float().repeat_interleave(len(turns), dim=1)
    return torch.cat([x, torch.sin(angles).to(x.dtype), torch.cos(angles).to(x.dtype)], dim=1)
""",
    "rows that others take the largest of, or send": """
from graphs.ops import scatter_reduce
from graphs.ranks import scatter
from torch_scatter import scatter_mean


class Messages(nn.Module):
    def forward(self, x, nodes, group):
        top = scatter_reduce(x, nodes, dim=0, reduce="max")
        return top + scatter_mean(x.float(), nodes, dim=0).to(x.dtype) + scatter(x, group)
""",
    "masked values that fit": """
from allennlp.nn import util


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.start = nn.Linear(width, 1)

    def forward(self, x, mask):
        logits = self.start(x).squeeze(-1)
        least = util.min_value_of_dtype(logits.dtype)
        return util.replace_masked_values(logits, mask, least), util.masked_mean(logits, mask, -1e4)
""",
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
