"""Products that are scaled too late, and normalised sums, wherever a library's callers come with fp16, and their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

BROKEN = {
    "a mean of the largest and the smallest scale": """
def balanced(weight, scales):
    scales = scales.clamp(min=1e-4).to(weight.dtype)
    return scales / (scales.max() * scales.min()).sqrt()  # <-
""",
    "by the root of a width": """
import math


class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, seen):
        q, k, v = self.q(x), self.k(x), self.v(x)
        seen = seen.to(x.dtype)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # <-
        return F.softmax(scores.masked_fill(seen == 0, float("-inf")), dim=-1) @ v
""",
    "by a root that is a tensor": """
class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, bias):
        q, k = self.q(x), self.k(x)
        scores = torch.bmm(q, k.transpose(1, 2)) / torch.sqrt(torch.tensor(q.shape[-1]).to(torch.float32))  # <-
        return F.softmax(scores + bias.to(x.dtype), dim=-1)
""",
    "kept above the least number": """
class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.width = nn.Linear(width, width), nn.Linear(width, width), width

    def forward(self, x, mask):
        scores = torch.matmul(self.q(x), self.k(x).transpose(2, 3)) / self.width**0.5  # <-
        scores = torch.max(scores + mask, torch.tensor(torch.finfo(scores.dtype).min, device=scores.device))
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
""",
    "by a power of a width that no one annotates": """
class Heads(nn.Module):
    def __init__(self, dim, num_heads=8, scale=None):
        super().__init__()
        self.heads = num_heads
        head_dim = dim // num_heads
        self.scale = scale or head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)

    def forward(self, x, height, width):
        rows, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        first, q = torch.split(q, [height * width, length - height * width], dim=2)
        scores = (q @ k.transpose(-2, -1)) * self.scale  # <-
        return (scores.softmax(dim=-1) @ v).to(x.dtype), first
""",
    "of queries that were turned": """
import math


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.width = nn.Linear(width, width), nn.Linear(width, width), width

    def forward(self, x, cos, sin, groups):
        q, k = self.q(x), self.k(x)
        q, k = (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
        k = k[:, :, None].expand(-1, -1, groups, -1, -1).reshape(x.shape[0], k.shape[1] * groups, -1, self.width)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.width)  # <-
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
""",
    "a mean by weights that are summed": """
class Instances(nn.Module):
    def __init__(self, width, instances):
        super().__init__()
        self.maps = nn.Conv2d(width, instances, 3, padding=1)

    def forward(self, x):
        weights = self.maps(x).sigmoid().flatten(2)
        pooled = torch.bmm(weights, x.flatten(2).transpose(1, 2))
        total = weights.sum(-1, keepdim=True).clamp(min=1e-6)
        return (pooled / total).to(x.dtype)  # <-
""",
    "a masked mean": """
def pooled(x, mask):
    mask = mask.to(x.dtype)
    return torch.einsum("bn,bnd->bd", mask, x) / (mask.sum(dim=1, keepdim=True) + 1e-6)  # <-
""",
    "products of a tensor with itself": """
def gram(y):
    rows, channels, height, width = y.shape
    features = y.reshape(rows, channels, -1)
    return (features.bmm(features.transpose(1, 2)) / (channels * height * width)).to(y.dtype)  # <-


def covariance(x):
    return (x.T @ x) / (x.shape[0] - 1)  # <-
""",
    "attention without a softmax, by an inverse": """
def attend(q, k, v):
    inverse = 1.0 / torch.einsum("bnd,bd->bn", q, k.sum(dim=1).type_as(q))
    context = torch.einsum("bnd,bne->bde", k, v)
    return torch.einsum("bnd,bde,bn->bne", q, context, inverse)  # <-


class Linear(nn.Module):
    def forward(self, q, k, v):
        below = q @ k.sum(dim=-2).unsqueeze(-1)
        out = q @ (k.transpose(-2, -1) @ v)
        return (out * below.reciprocal()).to(v.dtype)  # <-
""",
}
SOUND = {
    "a mean of the largest and the smallest scale, in fp32 or of their roots": """
def balanced(weight, scales):
    scales = scales.to(weight.dtype)
    by_roots = scales / (scales.max().sqrt() * scales.min().sqrt())
    return by_roots, scales / (scales.max().float() * scales.min().float()).sqrt()
""",
    "weights that were divided first": """
class Instances(nn.Module):
    def __init__(self, width, instances):
        super().__init__()
        self.maps = nn.Conv2d(width, instances, 3, padding=1)

    def forward(self, x):
        weights = self.maps(x).sigmoid().flatten(2)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        pooled = torch.bmm(weights, x.flatten(2).transpose(1, 2))
        return (pooled / pooled.norm(dim=-1, keepdim=True)).to(x.dtype)
""",
    "products of a tensor with itself that was divided, and of others": """
def gram(y):
    rows, channels, height, width = y.shape
    features = y.reshape(rows, channels, -1) / (channels * height * width) ** 0.5
    return features.bmm(features.transpose(1, 2)) / rows


def alike(x, y):
    return (x @ y.T).to(x.dtype) / x.shape[-1] ** 0.5, (x.float().T @ x.float()) / x.shape[0]
""",
    "attention in fp32, by an inverse": """
def attend(q, k, v):
    dtype = q.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = q.float(), k.float(), v.float()
        inverse = 1.0 / torch.einsum("bnd,bd->bn", q, k.sum(dim=1))
        context = torch.einsum("bnd,bne->bde", k, v)
        return torch.einsum("bnd,bde,bn->bne", q, context, inverse).to(dtype)
""",
    "queries that were scaled": """
import math


class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, mask):
        q = self.q(x) / math.sqrt(x.size(-1))
        scores = torch.matmul(q, self.k(x).transpose(2, 3))
        scores = torch.max(scores + mask, torch.tensor(torch.finfo(scores.dtype).min, device=scores.device))
        return F.softmax(scores, dim=-1)
""",
    "scores in fp32": """
import math


class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            q, k = self.q(x).float(), self.k(x).float()
            scores = q @ k.transpose(-2, -1) / torch.sqrt(torch.tensor(k.size(-1), dtype=torch.float32))
            return F.softmax(scores, dim=-1).to(x.dtype)
""",
    "by a temperature that is learned": """
class Heads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.scale = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * self.scale(x)
        return F.softmax(scores.to(x.dtype), dim=-1)
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_scaled(tmp_path: Path, name: str) -> None:
    text, found = hits(tmp_path, BROKEN[name])
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert [line for line, each in found if each == "scale-after-matmul"] == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert [each for each in hits(tmp_path, SOUND[name])[1] if each[1] == "scale-after-matmul"] == []
