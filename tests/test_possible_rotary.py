"""Rotary angles and tables that are rounded wherever a module's callers have it so: possible at least, and nothing of sound relatives."""

from pathlib import Path

import pytest

from precisionlint import check

HEAD = """
import torch
from torch import nn


"""

TABLES = """
class Rotary(nn.Module):
    def __init__(self, width, base=10000):
        super().__init__()
        self.inverse = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device).float()
        turns = torch.outer(steps, self.inverse)
        return {cos}, {sin}
"""

UPDATED = """
class Rotary(nn.Module):
    def __init__(self, options):
        super().__init__()
        inverse = 1.0 / (options.base ** (torch.arange(0, options.width, 2).float() / options.width))
        {kept}
        self.update(1024)

    def update(self, length, start=0):
        if hasattr(self, "cos") and self.cos.size(0) >= start + length:
            return self.cos
        turns = torch.outer(torch.arange(start + length, device=self.inverse.device), self.inverse)
        self.cos = turns.cos()
        return self.cos
"""

GIVEN = """
class Rotary(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.dtype = dtype
        self.inverse = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))

    def forward(self, x, x_pos):
        turns = x_pos[..., None]{cast} * self.inverse{cast}
        return turns.cos().to(self.dtype)
"""


CACHED = """
def cache(length, width, dtype):
    inverse = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype={dtype}) / width))
    return torch.polar(torch.ones(length, width // 2), torch.outer(torch.arange(length, dtype={dtype}), inverse).float())


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, 10)
        self.turns = cache(1024, width, self.head.weight.dtype)
"""


def told(folder: Path, text: str) -> list[int]:
    (folder / "rotary.py").write_text(HEAD + text, encoding="utf-8")
    report = check([str(folder / "rotary.py")], select=["half-rope"], min_confidence="possible")
    assert not report.errors
    return sorted({each.place.line for each in report.findings})


@pytest.mark.parametrize(
    ("cos", "sin", "lines"),
    [
        ("turns.cos().bfloat16()", "turns.sin()", [15]),
        ("turns.cos()", "(0.5 * turns.sin()).to(torch.float16)[None]", [15]),
        ("turns.cos()", "turns.sin()", []),
        ("turns.cos().float()", "turns.sin().type_as(x)", []),
    ],
)
def test_tables_that_are_kept_in_half(tmp_path: Path, cos: str, sin: str, lines: list[int]) -> None:
    assert told(tmp_path, TABLES.format(cos=cos, sin=sin)) == lines


def test_sines_of_no_positions_may_be_half(tmp_path: Path) -> None:
    text = TABLES.format(cos="(x.float() * 0.5).cos().bfloat16()", sin="turns.sin()")
    assert told(tmp_path, text) == []


def test_sines_that_turn_nothing_may_be_half(tmp_path: Path) -> None:
    text = TABLES.replace("class Rotary", "class Clock").format(cos="turns.cos().half()", sin="turns.sin().half()")
    assert told(tmp_path, text) == []


@pytest.mark.parametrize(
    ("kept", "lines"),
    [
        ('self.register_buffer("inverse", inverse, persistent=False)', [11]),
        ("self.inverse = inverse", []),
    ],
)
def test_what_init_runs_first_and_others_later(tmp_path: Path, kept: str, lines: list[int]) -> None:
    assert told(tmp_path, UPDATED.format(kept=kept)) == lines


@pytest.mark.parametrize(("cast", "lines"), [(".to(x.dtype)", [14]), (".float()", [])])
def test_positions_by_a_longer_name(tmp_path: Path, cast: str, lines: list[int]) -> None:
    assert told(tmp_path, GIVEN.format(cast=cast)) == lines


DIVIDED = """
class Places(nn.Module):
    def __init__(self, width):
        super().__init__()
        {made}

    def forward(self, x, mask):
        {places}
        return torch.cat([torch.sin(places[..., None] / {lengths}), x], dim=-1)
"""
KEPT = 'self.register_buffer("lengths", 10000 ** (torch.arange(0, width).float() / width))'
COUNTED = "places = torch.arange(x.shape[1], device=x.device).type_as(self.lengths)"
OF_X = "10000 ** (torch.arange(0, 64, device=x.device, dtype=x.dtype) / 64)"


@pytest.mark.parametrize(
    ("made", "places", "lengths", "lines"),
    [
        (KEPT, COUNTED, "self.lengths", [10, 14]),
        ("pass", "places = torch.arange(x.shape[1], device=x.device).to(x.dtype)", OF_X, [14]),
    ],
)
def test_positions_over_lengths_of_waves(
    made: str, places: str, lengths: str, lines: list[int], tmp_path: Path
) -> None:
    assert told(tmp_path, DIVIDED.format(made=made, places=places, lengths=lengths)) == lines


@pytest.mark.parametrize(
    ("made", "places", "lengths"),
    [
        (
            "pass",
            "places = torch.arange(x.shape[1], device=x.device).float()",
            OF_X.replace("x.dtype", "torch.float32"),
        ),
        # Shares of a length: no angle is large.
        ("pass", "places = torch.arange(x.shape[1], device=x.device).to(x.dtype) / x.shape[1] * 6.28", OF_X),
        (KEPT, "places = mask", "self.lengths"),
    ],
)
def test_positions_over_lengths_in_fp32_and_shares(made: str, places: str, lengths: str, tmp_path: Path) -> None:
    assert told(tmp_path, DIVIDED.format(made=made, places=places, lengths=lengths)) == []


@pytest.mark.parametrize(("dtype", "lines"), [("dtype", [9]), ("torch.float32", [])])
def test_tables_in_the_dtype_that_a_layer_has_when_it_is_made(dtype: str, lines: list[int], tmp_path: Path) -> None:
    assert told(tmp_path, CACHED.format(dtype=dtype)) == lines


TIMES = """
class TimeEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.mlp = nn.Linear(width, width)

    def forward(self, timesteps, x):
        half = self.width // 2
        frequencies = {frequencies}
        angles = timesteps[:, None]{cast} * frequencies[None]
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
"""


@pytest.mark.parametrize(
    ("frequencies", "cast", "told_at"),
    [
        ("torch.exp(-9.21 * torch.arange(half, dtype=torch.float32) / half).to(x.dtype)", ".to(x.dtype)", [16]),
        ("torch.exp(torch.arange(half, device=x.device, dtype=x.dtype) * -0.3)", ".to(x.dtype)", [16]),
        ("torch.exp(-9.21 * torch.arange(half, dtype=torch.float32) / half)", ".to(x.dtype)", []),
        ("torch.exp(torch.arange(half, device=x.device) * -0.3)", "", []),
        ("torch.exp(torch.arange(half, device=x.device) * -0.3)", ".float()", []),
    ],
)
def test_times_are_positions_and_exponentials_their_frequencies(
    tmp_path: Path, frequencies: str, cast: str, told_at: list[int]
) -> None:
    assert told(tmp_path, TIMES.format(frequencies=frequencies, cast=cast)) == told_at


MADE_IN = """
class Rotary(nn.Module):
    def __init__(self, width, base=10000, dtype={dtype}):
        super().__init__()
        self.dtype = dtype
        inverse = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        self.register_buffer("inverse", inverse{cast})

    def forward(self, x):
        turns = torch.outer(torch.arange(x.size(1), device=x.device).type_as(self.inverse), self.inverse)
        return turns.cos().type_as(x), turns.sin().type_as(x)
"""


@pytest.mark.parametrize(
    ("dtype", "cast", "lines"),
    [
        ("torch.half", "", []),  # nobody has to cast it, and what is kept in fp32 is meant so
        ("torch.half", ".to(dtype)", [12, 15]),
        ("None", "", [12, 15]),
    ],
)
def test_frequencies_in_fp32_of_an_object_that_is_made_in_half(
    tmp_path: Path, dtype: str, cast: str, lines: list[int]
) -> None:
    assert told(tmp_path, MADE_IN.format(dtype=dtype, cast=cast)) == lines


EARLY = """
class Rotary(nn.Module):
    def forward(self, x, dtype=torch.float):
        inverse = 1.0 / (10000 ** (torch.arange(0, x.shape[-1], 2{device}) / x.shape[-1]))
        turns = torch.einsum("i,j->ij", torch.arange(x.shape[1]{device}), inverse).to(x.device).to(dtype)
        return turns.sin(), turns.cos()
"""


@pytest.mark.parametrize(("device", "lines"), [("", []), (", device=x.device", [10])])
def test_a_product_of_what_is_made_on_the_cpu_is_left_alone(tmp_path: Path, device: str, lines: list[int]) -> None:
    assert told(tmp_path, EARLY.format(device=device)) == lines


AT_ONCE = """
class Rotary(nn.Module):
    def __init__(self, width, longest=2048):
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("inverse", inverse, persistent=False)
        {made}

    def tables(self, length):
        self.longest = length
        steps = torch.arange(length, device=self.inverse.device, dtype=self.inverse.dtype)
        turns = torch.outer(steps, self.inverse)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)

    def forward(self, x):
        if {more}:
            self.tables(x.shape[1])
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        cos, sin = self.rotary(x)
        return self.head(x * cos + x * sin)


def train(batches):
    model = Model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).float().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("made", "more", "grade"),
    [
        ("self.tables(longest)", "x.shape[1] > self.longest", "possible"),
        ("self.longest = 0", "x.shape[1] > self.longest", "likely"),  # the tables are made after the cast
        ("self.tables(longest)", "self.longest is None or x.shape[1] > self.longest", "likely"),
        ("self.tables(longest)", "x.requires_grad", "likely"),
    ],
)
def test_what_a_cast_leaves_of_frequencies_is_read_only_beyond_tables_that_are_made_at_once(
    tmp_path: Path, made: str, more: str, grade: str
):
    (tmp_path / "rotary.py").write_text(HEAD + AT_ONCE.format(made=made, more=more), encoding="utf-8")
    report = check([str(tmp_path / "rotary.py")], select=["half-rope"], min_confidence="possible")
    assert {each.confidence for each in report.findings} == {grade}
