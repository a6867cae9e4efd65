"""The operands of products in the fixed corpus (see ``inputs``): two FP8 matrices and their scales, and what is hard about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from precisionlint.formats import Format
from precisionlint.kernels.inputs import Case


class Operands(Struct, frozen=True):
    """A product's inputs: two FP8 matrices with the inner dimension last, and the scales of each."""

    a: Tensor
    a_scales: Tensor
    b: Tensor
    b_scales: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.a_scales, self.b, self.b_scales


def products(target: Format, per_block: bool) -> Iterator[Case]:
    """Operands of a product: a (M, K) and b (N, K) in `target`, and fp32 scales.

    With `per_block`, a has one scale for each 128 of a row and b one for each 128x128; otherwise each has a single one.
    """

    def case(name: str, size: tuple[int, int, int], change: Callable[[Operands], Operands] = _as_is) -> Case:
        m, n, k = size
        return Case(
            name,
            lambda: change(_operands(size, target, per_block)).tensors(),
            aligned=not (m % 128 or n % 128 or k % 128),
            contiguous=change not in (_transposed, _strided, _in_nan, _rows_far_apart, _scales_strided),
        )

    yield case("normal numbers", (128, 128, 256))
    yield case("several tiles", (256, 256, 128))
    yield case("all positive", (128, 128, 512), _positive)
    yield case("cancellation", (128, 128, 512), _cancelling)
    yield case("a large product before a thousand small ones", (128, 128, 1024), _large_first)
    yield case("scales of many sizes", (128, 256, 384), _varied_scales)
    yield case("only the last 128 of K count", (128, 128, 384), _last_block)
    yield case("outliers", (128, 128, 256), _spiked)
    yield case("zeros", (128, 128, 128), _zeroed)
    yield case("one NaN in a", (128, 128, 256), _nan_in_a)
    yield case("one NaN in b", (128, 128, 256), _nan_in_b)
    yield case("NaN for a scale", (128, 128, 256), _nan_scale)
    for size in ((5, 130, 200), (1, 1, 1), (129, 127, 129), (17, 1, 385), (64, 200, 31)):
        yield case(f"ragged, {size[0]}x{size[1]}x{size[2]}", size, _varied_scales)
    yield case("transposed operands", (128, 128, 256), _transposed)
    yield case("every second column", (128, 128, 256), _strided)
    yield case("parts of larger matrices of NaN", (70, 90, 150), _in_nan)
    yield case("transposed scales", (128, 256, 384), _scales_strided)
    yield case("offsets beyond 2^31", (128, 128, 128), _rows_far_apart)


def mx_products(target: Format) -> Iterator[Case]:
    """Operands of an MX product: a (M, K) and b (N, K) in `target`, E8M0 scales (rows, ceil(K / 32)) in uint8."""

    def case(name: str, size: tuple[int, int, int], change: Callable[[Operands], Operands] = _as_is) -> Case:
        m, n, k = size

        def make() -> tuple[Tensor, ...]:
            given = change(_operands(size, target, per_block=True))
            generator = torch.Generator().manual_seed(k)
            scales = [
                torch.randint(107, 148, (rows, -(-k // 32)), generator=generator, dtype=torch.uint8) for rows in (m, n)
            ]
            if change is _nan_scale:
                scales[1][-1, -1] = 255
            if change is _scales_strided:
                scales = [each.t().contiguous().t() for each in scales]
            return given.a, scales[0], given.b, scales[1]

        contiguous = change not in (_transposed, _strided, _in_nan, _rows_far_apart, _scales_strided)
        return Case(name, make, aligned=not (m % 128 or n % 128 or k % 128), contiguous=contiguous)

    yield case("normal numbers", (128, 128, 256))
    yield case("several tiles", (256, 256, 128))
    yield case("all positive", (128, 128, 512), _positive)
    yield case("zeros", (128, 128, 128), _zeroed)
    yield case("one NaN in a", (128, 128, 256), _nan_in_a)
    yield case("one NaN in b", (128, 128, 256), _nan_in_b)
    yield case("NaN for a scale", (128, 128, 256), _nan_scale)
    for size in ((5, 130, 200), (1, 1, 1), (129, 127, 129), (64, 200, 31)):
        yield case(f"ragged, {size[0]}x{size[1]}x{size[2]}", size)
    yield case("transposed operands", (128, 128, 256), _transposed)
    yield case("every second column", (128, 128, 256), _strided)
    yield case("parts of larger matrices of NaN", (70, 90, 150), _in_nan)
    yield case("transposed scales", (128, 128, 256), _scales_strided)
    yield case("offsets beyond 2^31", (128, 128, 128), _rows_far_apart)


def _operands(size: tuple[int, int, int], target: Format, per_block: bool) -> Operands:
    m, n, k = size
    generator = torch.Generator().manual_seed(m + n + k)
    dtype = target.torch_dtype
    a, b = (torch.randn(rows, k, generator=generator).mul(target.maximum / 8).to(dtype) for rows in (m, n))
    shapes = ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))) if per_block else ((), ())
    a_scales, b_scales = (torch.rand(shape, generator=generator) + 0.5 for shape in shapes)
    return Operands(a, a_scales, b, b_scales)


def _as_is(given: Operands) -> Operands:
    return given


def _positive(given: Operands) -> Operands:
    """No term cancels another, so that a stalled or narrow accumulator falls behind."""
    return replace(given, a=_magnitude(given.a), b=_magnitude(given.b))


def _magnitude(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) & 0x7F).view(x.dtype)


def _cancelling(given: Operands) -> Operands:
    """The second half of K takes back the first, up to one product: what was lost on the way stays."""
    a, b = given.a.clone(), given.b.clone()
    half = a.shape[1] // 2
    a[:, half:] = (a[:, :half].view(torch.uint8) ^ 0x80).view(a.dtype)
    b[:, half:] = b[:, :half]
    a[:, -1] = torch.tensor(1.0).to(a.dtype)
    return replace(given, a=a, b=b, a_scales=torch.ones_like(given.a_scales), b_scales=torch.ones_like(given.b_scales))


def _large_first(given: Operands) -> Operands:
    """maximum^2 at k = 0 and ones after it, with scales of 1: 14 bits of accumulator lose all of the ones."""
    a, b = torch.ones(given.a.shape), torch.ones(given.b.shape)
    a[:, 0] = b[:, 0] = 448.0
    ones = replace(given, a_scales=torch.ones_like(given.a_scales), b_scales=torch.ones_like(given.b_scales))
    return replace(ones, a=a.to(given.a.dtype), b=b.to(given.b.dtype))


def _varied_scales(given: Operands) -> Operands:
    """No two scales are near each other, so that one in another's place shows."""
    found = []
    for scales, seed in ((given.a_scales, 1), (given.b_scales, 2)):
        generator = torch.Generator().manual_seed(seed)
        power = torch.randint(-12, 13, scales.shape, generator=generator)
        found.append(torch.exp2(power.float()) * (1 + torch.rand(scales.shape, generator=generator)))
    return replace(given, a_scales=found[0], b_scales=found[1])


def _last_block(given: Operands) -> Operands:
    scales = given.a_scales.clone()
    if scales.ndim:
        scales[:, :-1] = 2.0**-30
    a = given.a.clone()
    a[:, :-1] = torch.zeros((), dtype=a.dtype)
    return replace(given, a=a, a_scales=scales)


def _spiked(given: Operands) -> Operands:
    a = given.a.float() / 64
    a[:, ::37] *= 64
    return replace(given, a=a.to(given.a.dtype))


def _zeroed(given: Operands) -> Operands:
    return replace(given, a=torch.zeros_like(given.a))


def _nan_in_a(given: Operands) -> Operands:
    a = given.a.clone()
    a.view(torch.uint8)[3, 200] = 0x7F
    return replace(given, a=a)


def _nan_in_b(given: Operands) -> Operands:
    b = given.b.clone()
    b.view(torch.uint8)[-1, -1] = 0x7F
    return replace(given, b=b)


def _nan_scale(given: Operands) -> Operands:
    scales = given.b_scales.clone()
    scales.view(-1)[-1] = math.nan
    return replace(given, b_scales=scales)


def _transposed(given: Operands) -> Operands:
    return replace(given, a=given.a.t().contiguous().t(), b=given.b.t().contiguous().t())


def _strided(given: Operands) -> Operands:
    a, b = (x.repeat_interleave(2, 1) for x in (given.a, given.b))
    a.view(torch.uint8)[:, 1::2] = 0x7E  # the largest number or an infinity: a wrong stride shows
    return replace(given, a=a[:, ::2], b=b[:, ::2])


def _in_nan(given: Operands) -> Operands:
    """Both operands inside matrices of NaN: a read beyond an edge reaches the result, even when it meets a zero."""
    parts = []
    for x in (given.a, given.b):
        whole = torch.full((x.shape[0] + 70, x.shape[1] + 140), 0x7F, dtype=torch.uint8).view(x.dtype)
        part = whole[3 : 3 + x.shape[0], 5 : 5 + x.shape[1]]
        part.copy_(x)
        parts.append(part)
    return replace(given, a=parts[0], b=parts[1])


def _scales_strided(given: Operands) -> Operands:
    """The scales stored column by column, as DeepGEMM and cuBLAS keep those of a."""
    varied = _varied_scales(given)
    if not varied.a_scales.ndim:
        return varied
    transposed = (x.t().contiguous().t() for x in (varied.a_scales, varied.b_scales))
    return replace(varied, **dict(zip(("a_scales", "b_scales"), transposed, strict=True)))


def _rows_far_apart(given: Operands) -> Operands:
    """a's rows so far apart that its last begins 2^31 elements after the first; only their own pages take memory."""
    rows, inner = given.a.shape
    step = -(-(2**31) // (rows - 1))
    a = (
        torch.empty((rows - 1) * step + inner, dtype=torch.uint8)
        .view(given.a.dtype)
        .as_strided((rows, inner), (step, 1))
    )
    a.copy_(given.a)
    return replace(given, a=a)
