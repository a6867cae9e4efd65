"""The fixed corpus: inputs that tell a correct kernel from one that is only right on random numbers.

It knows shapes, strides and numbers that are hard, not what a kernel should return for them. All is made from fixed
seeds. A case is made when it is asked for, because some are large; each tensor lies inside a larger storage with a halo
of hostile numbers where that is possible, so that reading next to it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.formats import FP32, Format, decode

Make = Callable[[], tuple[Tensor, ...]]

HUGE = 3e37
"""What lies around numbers: a maximum over it is wrong, unlike one over NaN, which tl.max drops."""

HALO = 256
"""How much of it lies before and after numbers without gaps: as much as a kernel may read beyond an end by mistake."""


class Case(Struct, frozen=True):
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
        yield Case(f"ragged, {m}x{n}", partial(_ragged, m, n, False), aligned=False)
        yield Case(f"ragged, {m}x{n}, a part of a larger matrix", partial(_ragged, m, n, True), False, contiguous=False)
    yield Case("transposed", one(lambda g: draw(g).t().contiguous().t()), contiguous=False)
    yield Case("every second column", one(lambda g: normal(rows, 4 * width)(g)[:, ::2]), contiguous=False)
    yield Case("a part of a larger matrix", one(lambda g: _in_halo(draw(g).bfloat16())), contiguous=False)
    yield Case("offsets beyond 2^31", partial(_far_apart, shape), contiguous=False)


def casts(target: Format) -> Iterator[Case]:
    """Tensors for a cast into `target`: every fp16 and bf16 number, every midpoint, the ends; (N,), fp32 and halves."""
    patterns = torch.arange(2**16).to(torch.uint16)
    yield Case("every fp16 number", lambda: (patterns.view(torch.float16),))
    yield Case("every bf16 number", lambda: (patterns.view(torch.bfloat16),))
    yield Case("every fp16 and bf16 number in fp32", partial(_halves_in_fp32, patterns))
    if target.bits <= 16:
        yield Case("each midpoint and its neighbours", partial(_all_midpoints, target), aligned=False)
    for size in (1, 31, 4097):
        yield Case(f"{size} numbers", partial(_numbers, size), aligned=False)
    yield Case("every second number", lambda: (_numbers(2048)[0][::2],), contiguous=False)


def _halves_in_fp32(patterns: Tensor) -> tuple[Tensor]:
    return (torch.cat([patterns.view(torch.float16).float(), patterns.view(torch.bfloat16).float()]),)


def _all_midpoints(target: Format) -> tuple[Tensor]:
    table = decode(torch.arange(target.top_code + 1), target)
    middle = ((table[1:] + table[:-1]) / 2).float()
    beyond = torch.tensor([1.0, 1.03125, 1.0625, 1.125, 2.0, 1e6]) * target.maximum
    around = torch.cat([middle, _next(middle, 1), _next(middle, -1), beyond])
    return (torch.cat([around, -around]),)


def _numbers(size: int) -> tuple[Tensor]:
    return (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100,)


def stochastic(target: Format) -> Iterator[Case]:
    """fp32 tensors, (N,), and a seed (one int64) for a stochastic cast into `target`."""

    def case(name: str, make: Callable[[], Tensor], seed: int = 0) -> Case:
        return Case(name, lambda: (make(), torch.tensor(seed)))

    unit = target.epsilon
    for fraction in (0.25, 0.5, 0.9):
        yield case(f"a fraction of {fraction}", partial(torch.full, (2**16,), 1 + fraction * unit))
    yield case("a negative number", lambda: torch.full((2**16,), -(1 + 0.25 * unit)))
    yield case("a subnormal number", lambda: torch.full((2**16,), 2.25 * target.smallest))
    yield case("below the smallest number", lambda: torch.full((2**16,), 0.25 * target.smallest))
    yield case("another seed", lambda: torch.full((2**16,), 1 + 0.25 * unit), seed=12345)
    yield case("every number of the format", partial(_every_number, target))
    yield case("numbers of every size", lambda: _sizes_between(target))
    yield case("beyond the maximum, infinities, NaN", partial(_beyond, target))


def _every_number(target: Format) -> Tensor:
    codes = torch.arange(target.top_code + 1) if target.bits <= 8 else torch.arange(0, target.top_code + 1, 37)
    table = decode(codes, target).float()
    # A fault that strikes one draw of 2^16 needs some hundred thousand draws to show.
    return torch.cat([table, -table]).repeat(2**18 // table.numel())


def _sizes_between(target: Format) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    powers = torch.linspace(math.log2(target.smallest), math.log2(target.maximum), 4096, dtype=torch.float64)
    return (torch.exp2(powers) * (0.5 + torch.rand(4096, generator=generator, dtype=torch.float64) / 2)).float()


def _beyond(target: Format) -> Tensor:
    top = target.maximum
    ends = torch.tensor([top, top * 1.001, 3e38, math.inf, math.nan, 3.4e38], dtype=torch.float64).float()
    return torch.cat([ends, -ends]).repeat(100)


def coded(block: tuple[int | None, int | None], target: Format) -> Iterator[Case]:
    """Codes (M, N) in `target` and fp32 scales by such blocks, for the way back."""

    def case(name: str, rows: int, columns: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Case:
        def make() -> tuple[Tensor, Tensor]:
            codes = torch.arange(rows * columns).mul(7).to(torch.uint8).view(target.torch_dtype).reshape(rows, columns)
            height, width = block[0] or rows, block[1] or columns
            generator = torch.Generator().manual_seed(rows + columns)
            grid = (-(-rows // height), -(-columns // width))
            power = torch.randint(-60, 61, grid, generator=generator)
            return change(codes, torch.exp2(power.float()) * (1 + torch.rand(grid, generator=generator)))

        return Case(name, make, aligned=not (rows % 128 or columns % 128), contiguous=change is _unchanged)

    yield case("every code", 128, 256, _unchanged)
    for rows, columns in ((5, 200), (1, 1), (129, 127)):
        yield case(f"ragged, {rows}x{columns}", rows, columns, _unchanged)
    yield case("transposed codes", 128, 256, lambda codes, scales: (codes.t().contiguous().t(), scales))
    yield case("transposed scales", 256, 384, lambda codes, scales: (codes, scales.t().contiguous().t()))
    yield case("tiny and huge scales", 128, 256, _extreme_scales)
    yield case("NaN and infinity for a scale", 128, 256, _special_scales)


def _unchanged(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return codes, scales


def _extreme_scales(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([2.0**-126, 2.0**-140, 3e38, 2.0**-149, 1e36])
    return codes, ends.repeat(-(-scales.numel() // 5))[: scales.numel()].reshape(scales.shape)


def _special_scales(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    scales.view(-1)[0] = math.nan
    scales.view(-1)[-1] = math.inf
    return codes, scales


def _ragged(rows: int, columns: int, part: bool) -> tuple[Tensor]:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return (_in_halo(x) if part else _between(x),)


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
    whole = torch.full((x.shape[0] + 6, x.shape[1] + 10), HUGE, dtype=x.dtype)
    part = whole[3 : 3 + x.shape[0], 5 : 5 + x.shape[1]]
    part.copy_(x)
    return part


def _between(x: Tensor) -> Tensor:
    """x without gaps between its rows, with huge numbers before it and after it."""
    whole = torch.full((x.numel() + 2 * HALO,), HUGE, dtype=x.dtype)
    part = whole[HALO:-HALO].view(x.shape)
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
