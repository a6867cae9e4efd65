"""Products that are scaled too late wherever a library's callers come with fp16: possible, and nothing of their sound relatives."""

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
}
SOUND = {
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
