"""Products that are scaled too late, and normalised sums, wherever a library's callers come with fp16, and their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

BROKEN = {
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
