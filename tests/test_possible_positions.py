"""Positions that take the dtype of what a library's callers come with: possible, and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

from precisionlint import check

BROKEN = {
    "one number for each pixel": """
def components(image, rounds):
    height, width = image.shape[-2:]
    marks = torch.arange(1, height * width + 1, device=image.device, dtype=image.dtype)  # <-
    return marks.reshape(1, 1, height, width)
""",
    "one number for each step of what is passed": """
def warp(x, shift):
    rows = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)  # <-
    return F.grid_sample(x, rows[:, None] + shift)


def points(height, width, dtype):
    across = torch.arange(width, dtype=dtype)  # <-
    return across[None], torch.arange(4, dtype=dtype)
""",
    "one number for each cell of a volume": """
def numbered(volume):
    d, h, w = volume.shape[-3:]
    return torch.arange(d * h * w, dtype=volume.dtype).view(d, h, w)  # <-
""",
    "positions that are cast": """
class LinearBias(nn.Module):
    def position_bias(self, scores, slopes):
        distance = torch.arange(scores.shape[-1], device=scores.device).to(scores.dtype)  # <-
        return scores - slopes * distance


def relative_positions(query, length):
    return torch.arange(length, device=query.device)[None, :].type_as(query)  # <-
""",
    "positions that are written": """
def image_ids(height, width, dtype, device):
    ids = torch.zeros(height, width, 3, dtype=dtype, device=device)  # <-
    ids[..., 1] = torch.arange(height, device=device)[:, None]
    ids[..., 2] = torch.arange(width, device=device)[None, :] + 1
    return ids.flatten(0, 1)


def grid(latents, rows, columns):
    places = latents.new_empty(rows, columns, 2, dtype=latents.dtype)  # <-
    places[..., 0] = torch.arange(rows)[:, None]
    return places
""",
}

SOUND = {
    "steps within lengths, and of whole numbers": """
def reached(length, longest):
    return torch.arange(longest, dtype=length.dtype, device=length.device)[None] < length[:, None]


def padded_positions(pos, length):
    more = torch.arange(pos.size(1), length, dtype=pos.dtype, device=pos.device)
    return torch.cat([pos, more.unsqueeze(0).expand(pos.size(0), -1)], dim=1)


def order(x):
    ids = torch.arange(x.numel(), dtype=x.dtype, device=x.device)
    return ids, torch.arange(x.shape[0], dtype=torch.int64)
""",
    "numbers in fp32 and integers": """
def components(image, rounds):
    height, width = image.shape[-2:]
    marks = torch.arange(1, height * width + 1, device=image.device, dtype=torch.float32)
    return marks.reshape(1, 1, height, width).to(image.dtype)


def image_ids(height, width, dtype, device):
    ids = torch.zeros(height, width, 3, device=device)
    ids[..., 1] = torch.arange(height, device=device)[:, None]
    return ids.flatten(0, 1)


def position_ids(input_ids, length):
    ids = torch.zeros(3, length, dtype=input_ids.dtype)
    ids[0] = torch.arange(length)
    ids[1] = torch.arange(length).to(input_ids.dtype)
    return ids
""",
    "few, or of channels, or of other things": """
def levels(x, count):
    return torch.arange(count, dtype=x.dtype, device=x.device) / count


def embed_positions(x, width):
    return 10000 ** (-torch.arange(0, width, 2).to(x.dtype) / width)


def corners(x):
    grid = torch.zeros(4, 2, dtype=x.dtype)
    grid[:, 0] = torch.arange(4)
    grid[:, 1] = x.mean()
    return grid


def position_tables(x, length):
    angles = torch.outer(torch.arange(length).float(), x.float())
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    text, found = hits(tmp_path, BROKEN[name])
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert [line for line, each in found if each == "half-arange"] == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert [each for each in hits(tmp_path, SOUND[name])[1] if each[1] in ("half-arange", "half-rope")] == []


TRAINED = """
import torch
from torch import nn


class RotaryPositions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Linear(width, width)

    def angles(self, query, {sides}):
        rows = torch.arange({sides}, device=query.device, dtype=query.dtype)
        return query + rows[:, None]

    def forward(self, x, {sides}):
        return self.angles(self.table(x), {sides})


def train(loader, sides):
    model = RotaryPositions(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x, sides).float().mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("sides", "confidence"), [("length", "certain"), ("grid_h", "possible"), ("num_patches_w", "possible")]
)
def test_a_side_of_a_grid_of_patches_is_short(tmp_path: Path, sides: str, confidence: str) -> None:
    (tmp_path / "train.py").write_text(TRAINED.format(sides=sides), encoding="utf-8")
    found = check([str(tmp_path / "train.py")], select=["half-arange"], min_confidence="possible").findings
    assert [each.confidence for each in found] == [confidence]
