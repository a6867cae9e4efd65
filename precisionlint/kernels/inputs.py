"""The fixed corpus: inputs that tell a correct kernel from one that is only right on random numbers.

It knows shapes, strides and numbers that are hard, not what a kernel should return for them. All is made from fixed
seeds. A case is made when it is asked for, because some are large; each tensor lies inside a larger storage with a halo
of hostile numbers where that is possible, so that reading next to it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from precisionlint.formats import FP32, Format, decode

Make = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One input: what is hard about it, and how its tensors are made."""

    name: str
    make: Make
    aligned: bool = True
    """Whether each size is a multiple of the block's."""
    contiguous: bool = True


def matrices(block: tuple[int | None, int | None], target: Format) -> Iterator[Case]:
    """Matrices for a quantiser with such blocks (None: the whole of that dimension) into such a format.

    Each case makes one tensor, (M, N), fp32, fp16 or bf16.
    """
    rows = 128 if block[0] == 128 else 4
    width = block[1] or 96
    shape = (rows, 2 * width)

    def one(make: Callable[[torch.Generator], Tensor], seed: int = 0) -> Make:
        return lambda: (make(torch.Generator().manual_seed(seed)),)

    def normal(*size: int) -> Callable[[torch.Generator], Tensor]:
        return lambda generator: torch.randn(*(size or shape), generator=generator)

    draw = normal()
    yield Case("normal numbers", one(lambda g: draw(g).bfloat16()))
    yield Case("all negative", one(lambda g: -draw(g).abs() - 0.01))
    yield Case("outliers", one(lambda g: _outliers(draw(g)).bfloat16()))
    yield Case("zeros", one(lambda g: torch.zeros(shape)))
    yield Case("a block of zeros beside one of numbers", one(lambda g: _second_half(draw(g), 0.0).bfloat16()))
    yield Case("minus zero and one number", one(lambda g: _one_number(-torch.zeros(shape), 3.0)))
    yield Case("a different size in each row and block", one(lambda g: draw(g) * _powers(shape, width, -40, 40)))
    yield Case(
        "blocks down to subnormal numbers", one(lambda g: draw(g) * _powers((rows, 2 * width), width, -149, -90))
    )
    yield Case("subnormal numbers alone", one(lambda g: draw(g).clamp(-4, 4) * 2.0**-130))
    yield Case("numbers near fp32's maximum", one(lambda g: draw(g).clamp(-1, 1) * FP32.maximum))
    yield Case("fp16's ends", one(lambda g: _second_half(draw(g).sign() * 65504, 6e-8).half()))
    yield Case("midpoints under a scale of 1", one(lambda g: _midpoints(shape, width, target, 1.0)))
    yield Case("midpoints under a scale of 2^-9", one(lambda g: _midpoints(shape, width, target, 2.0**-9)))
    yield Case("midpoints under an odd scale", one(lambda g: _midpoints(shape, width, target, 1.1)))
    yield Case("midpoints in bf16", one(lambda g: _midpoints(shape, width, target, 1.0, dtype=torch.bfloat16)))
    yield Case("largest magnitudes around a power of two", one(lambda g: _boundaries(shape, width, target)))
    yield Case("the largest magnitude in each place", one(lambda g: _travelling(draw(g), width)))
    yield Case("NaN and infinities", one(lambda g: _nonfinite(draw(g), width)))
    yield Case("NaN in bf16", one(lambda g: _one_number(draw(g), math.nan).bfloat16()))
    for m, n in ((rows + 1, width + width // 2 + 8), (1, 1), (rows - 1, width + 1), (3, width - 1)):
        yield Case(f"ragged, {m}x{n}", partial(_ragged, m, n), aligned=False)
    yield Case("transposed", one(lambda g: draw(g).t().contiguous().t()), contiguous=False)
    yield Case("every second column", one(lambda g: normal(rows, 4 * width)(g)[:, ::2]), contiguous=False)
    yield Case("a part of a larger matrix", one(lambda g: _in_halo(draw(g).bfloat16())), contiguous=False)
    yield Case("offsets beyond 2^31", partial(_far_apart, shape), contiguous=False)


def _ragged(rows: int, columns: int) -> tuple[Tensor]:
    return (_in_halo(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))),)


def _outliers(x: Tensor) -> Tensor:
    x[:, :4] *= torch.tensor([1e2, 1e4, 3e4, 1e3])
    return x


def _second_half(x: Tensor, value: float) -> Tensor:
    x[:, x.shape[1] // 2 :] = value
    return x


def _one_number(x: Tensor, value: float) -> Tensor:
    x[0, 0] = value
    return x


def _powers(shape: tuple[int, int], width: int, low: int, high: int) -> Tensor:
    """A power of two for each row and block, spread evenly from 2^low to 2^high, constant within a block."""
    blocks = -(-shape[1] // width)
    exponents = torch.linspace(low, high, shape[0] * blocks, dtype=torch.float64).round().reshape(shape[0], blocks)
    return torch.exp2(exponents).float().repeat_interleave(width, 1)[:, : shape[1]]


def _midpoints(
    shape: tuple[int, int], width: int, target: Format, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Each midpoint of two neighbouring codes times the scale, one step of the dtype to either side, both signs.

    The first element of each block fixes the scale: the format's maximum times it.
    """
    table = decode(torch.arange(target.top_code + 1), target)
    middle = ((table[1:] + table[:-1]) / 2 * scale).to(dtype)
    around = torch.cat([middle, _next(middle, 1), _next(middle, -1)])
    around = torch.cat([around, -around])
    size = shape[0] * shape[1]
    x = around.repeat(-(-size // around.numel()))[:size].reshape(shape).clone()
    x[:, ::width] = torch.tensor(target.maximum * scale).to(dtype)
    return x


def _next(x: Tensor, steps: int) -> Tensor:
    """The number so many representable steps further from zero."""
    bits = torch.int32 if x.dtype == torch.float32 else torch.int16
    return (x.view(bits) + steps).view(x.dtype)


def _boundaries(shape: tuple[int, int], width: int, target: Format) -> Tensor:
    """Blocks whose largest magnitude is maximum * 2^k, or one step below or above it, the rest one half of it."""
    starts = range(0, shape[1], width)
    x = torch.empty(shape)
    count = 0
    for row in range(shape[0]):
        for start in starts:
            edge = torch.tensor(target.maximum * 2.0 ** ((7 * count) % 41 - 20))
            largest = _next(edge, (0, 1, -1)[count % 3])
            x[row, start : start + width] = largest / 2
            x[row, start + count % width] = -largest if count % 2 else largest
            count += 1
    return x


def _travelling(x: Tensor, width: int) -> Tensor:
    """Rows, each with its largest magnitude in another place, so that every place of a block has its turn."""
    rows = max(width, x.shape[0])
    wide = x.repeat(-(-rows // x.shape[0]), 1)[:rows] * 0.01
    place = torch.arange(rows)
    for start in range(0, x.shape[1], width):
        wide[place, start + (place * 5 + start) % width] = -10.0
    return wide


def _nonfinite(x: Tensor, width: int) -> Tensor:
    x[0, 1] = math.nan
    x[1, width - 1] = math.inf
    x[2, 2] = -math.inf
    x[3, 0], x[3, width - 1] = math.nan, math.inf
    return x


def _in_halo(x: Tensor) -> Tensor:
    """x as a part of a larger matrix whose other numbers are huge: a maximum over them is wrong, unlike over NaN."""
    whole = torch.full((x.shape[0] + 6, x.shape[1] + 10), 3e37, dtype=x.dtype)
    part = whole[3 : 3 + x.shape[0], 5 : 5 + x.shape[1]]
    part.copy_(x)
    return part


def _far_apart(shape: tuple[int, int]) -> tuple[Tensor]:
    """Rows so far apart that the last begins 2^31 elements after the first; only the pages of the rows take memory."""
    rows = shape[0]
    step = -(-(2**31) // (rows - 1))
    storage = torch.empty((rows - 1) * step + shape[1], dtype=torch.bfloat16)
    x = storage.as_strided(shape, (step, 1))
    x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return (x,)
