"""Plain float64 statements of scaled quantisation and of the products of scaled operands.

It knows what the results should be, not how a kernel may deviate from them: that is in `contracts`. Matrices are
(rows, columns); a block is (rows, columns) of the part that shares one scale; parts at the edge may be smaller. Scales
are multipliers for the way back: number = value * scale.
"""

from __future__ import annotations

from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.formats import E2M1, E4M3FN, E8M0FNU, FP32, Format, round_to

ScaleKind = Literal["fp32", "power-of-two"]
MxRounding = Literal["floor", "ceil", "rceil", "even"]
Block = tuple[int, int]

MX_BLOCK: Block = (1, 32)
NVFP4_BLOCK: Block = (1, 16)

AMAX_FLOOR = 2.0**-110
"""The least magnitude that a scale is made for here: the first power of two whose scale is a normal fp32 number for
both FP8 formats (E5M2's maximum is 1.75 * 2^15, the smallest normal 2^-126)."""

NVFP4_AMAX_FLOOR = 2.0**-105
"""The least largest magnitude of a tensor in NVFP4 here: with it the scale of the tensor, amax / 2688, times the
smallest scale of a block, 2^-9, is a normal fp32 number, 2^-125.4."""


class Quantized(Struct, frozen=True):
    """The rounded values (float64, each one of the element format's) and one scale a block (float64)."""

    values: Tensor
    scales: Tensor


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude in each block of a matrix, float64, (row blocks, column blocks); NaN where one is NaN."""
    rows, columns = (-(-size // each) for size, each in zip(x.shape, block, strict=True))
    padded = x.new_zeros((rows * block[0], columns * block[1]), dtype=torch.float64)
    padded[: x.shape[0], : x.shape[1]] = x.to(torch.float64).abs()
    return padded.reshape(rows, block[0], columns, block[1]).amax((1, 3))


def spread(scales: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One scale for each element of a matrix of that shape, from one for each block."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def power_of_two_scale(amax: Tensor, target: Format) -> Tensor:
    """The smallest power of two s with amax / s <= target.maximum; float64, exact; 0 where amax is 0.

    With amax = m * 2^k and maximum = n * 2^j, m and n in [0.5, 1), that is 2^(k - j), doubled where m > n.
    """
    top = torch.frexp(torch.tensor(target.maximum, dtype=torch.float64))
    fraction, exponent = torch.frexp(amax.to(torch.float64))
    power = exponent - top.exponent + (fraction > top.mantissa)
    return torch.where(amax == 0, 0.0, torch.exp2(power.to(torch.float64)))


def scale_of(amax: Tensor, target: Format, kind: ScaleKind, floor: float) -> Tensor:
    """The scale of blocks with these largest magnitudes, raised to `floor` first; float64 numbers that fp32 holds."""
    raised = amax.to(torch.float64).clamp(min=floor)
    if kind == "power-of-two":
        return power_of_two_scale(raised, target)
    return round_to(raised / target.maximum, FP32)


def quantize(
    x: Tensor, block: Block, target: Format = E4M3FN, kind: ScaleKind = "fp32", floor: float = AMAX_FLOOR
) -> Quantized:
    """x scaled by block, so that the largest magnitude of each lands on the format's maximum or below it, and rounded.

    `block` may be x's own shape (one scale for the tensor), (1, columns) (one a row), (1, 128), (128, 128). `floor` is
    the least amax that a scale is made for; the default gives scales that are normal fp32 numbers, also for a block of
    zeros.
    """
    scales = scale_of(block_amax(x, block), target, kind, floor)
    quotient = x.to(torch.float64) / spread(scales, block, x.shape)
    return Quantized(round_to(quotient, target, overflow="saturate"), scales)


def delayed_scale(history: Tensor, target: Format = E4M3FN, margin: int = 0) -> Tensor:
    """The scale for the next step from the amaxes of the last ones: their maximum times 2^margin; 1 where it is 0.

    As TransformerEngine's DelayedScaling with amax_compute_algo 'max' computes it, inverted (a multiplier for the way
    back): history is (steps,), the result a float64 scalar that fp32 holds.
    """
    amax = history.to(torch.float64).max()
    return torch.where(amax > 0, round_to(amax * 2.0**margin / target.maximum, FP32), 1.0)


def quantize_with_scale(x: Tensor, scale: Tensor, target: Format = E4M3FN) -> Tensor:
    """x / scale, rounded and saturated; the form that delayed scaling needs, whose scale does not come from x."""
    return round_to(x.to(torch.float64) / scale, target, overflow="saturate")


def mx_scale(amax: Tensor, target: Format, rounding: MxRounding) -> Tensor:
    """The power of two that a block of MX numbers shares, float64, one of E8M0's values; 2^-127 where amax is 0.

    floor: 2^(floor(log2 amax) - e), e the exponent of the format's maximum (OCP Microscaling Formats 1.0, section 6.3);
    the largest elements may saturate. ceil: the same with the ceiling. rceil: the smallest power of two that saturates
    nothing, as `cvt.rp` to ue8m0 of amax / maximum gives it. even: floor of amax rounded to the element's precision.
    The four are torchao's ScaleCalculationMode.
    """
    exact = amax.to(torch.float64)
    if rounding == "rceil":
        scale = power_of_two_scale(exact, target)
    else:
        if rounding == "even":
            unbounded = Format("", 11, target.mantissa_bits, 1023, "ieee", None)
            exact = round_to(exact, unbounded)
        fraction, exponent = torch.frexp(exact)
        shift = (exponent - 1).to(torch.float64) - target.max_exponent
        scale = torch.exp2(shift + ((fraction > 0.5) & (rounding == "ceil")))
    scale = scale.clamp(E8M0FNU.smallest, E8M0FNU.maximum)
    scale = torch.where(amax == 0, E8M0FNU.smallest, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def quantize_mx(x: Tensor, target: Format = E4M3FN, rounding: MxRounding = "floor") -> Quantized:
    """Blocks of 32 along the rows with a shared power of two each; elements saturate."""
    scales = mx_scale(block_amax(x, MX_BLOCK), target, rounding)
    return Quantized(quantize_with_scale(x, spread(scales, MX_BLOCK, x.shape), target), scales)


class Nvfp4(Struct, frozen=True):
    """E2M1 values, one E4M3 scale for each 16 of a row, and one fp32 scale for the tensor; all float64."""

    values: Tensor
    scales: Tensor
    tensor_scale: Tensor


def nvfp4_tensor_scale(x: Tensor) -> Tensor:
    """amax / (448 * 6), the scale that puts the largest block scale on E4M3's maximum; 1 for a tensor of zeros."""
    amax = x.to(torch.float64).abs().max()
    return torch.where(amax > 0, round_to(amax / (E4M3FN.maximum * E2M1.maximum), FP32), 1.0)


def quantize_nvfp4(x: Tensor, noise: Tensor | None = None) -> Nvfp4:
    """NVFP4: each value is E2M1 * E4M3 scale of its 16 * fp32 scale of the tensor.

    `noise` (float64 in [0, 1), x's shape) rounds the elements stochastically. A block whose scale rounds to 0 is zeros.
    """
    tensor_scale = nvfp4_tensor_scale(x)
    scales = round_to(block_amax(x, NVFP4_BLOCK) / E2M1.maximum / tensor_scale, E4M3FN, overflow="saturate")
    whole = spread(scales * tensor_scale, NVFP4_BLOCK, x.shape)
    quotient = torch.where(whole > 0, x.to(torch.float64) / whole, 0.0)
    mode: Literal["nearest-even", "stochastic"] = "nearest-even" if noise is None else "stochastic"
    return Nvfp4(round_to(quotient, E2M1, mode=mode, overflow="saturate", noise=noise), scales, tensor_scale)


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of +1 and -1, (size, size), float64; raises ValueError unless size is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Sylvester-Hadamard matrix has a power of two as its size, not {size}")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def random_hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Each run of n = len(signs) along the rows, times the orthogonal matrix diag(signs) H_n / sqrt(n); float64.

    signs is +1 or -1, and n divides the number of columns. Applied to both operands of a product along the inner
    dimension it leaves the product as it was, and spreads an outlier over n elements.
    """
    size = signs.shape[0]
    matrix = signs.to(torch.float64)[:, None] * hadamard(size) / float(size) ** 0.5
    runs = x.to(torch.float64).reshape(*x.shape[:-1], -1, size)
    return torch.matmul(runs, matrix).reshape(x.shape)


def dequantize(values: Tensor, scales: Tensor, block: Block) -> Tensor:
    """value * scale, float64: exact for formats of at most 24 significant bits with fp32 scales."""
    return values.to(torch.float64) * spread(scales.to(torch.float64), block, values.shape)


def blockscaled_matmul(
    a: Tensor, a_scales: Tensor, a_block: Block, b: Tensor, b_scales: Tensor, b_block: Block
) -> Tensor:
    """The product of two dequantised matrices, (M, K) and (K, N), float64."""
    return dequantize(a, a_scales, a_block) @ dequantize(b, b_scales, b_block)


def matmul_with_narrow_accumulator(
    a: Tensor, b: Tensor, *, bits: int = 14, step: int = 32, promote: int | None = 128
) -> Tensor:
    """a @ b, (M, K) x (K, N), as a tensor core does that keeps `bits` significant bits between promotions; float64.

    Each `step` products are added, each cut toward zero to `bits` bits below the largest of them and of the partial
    sum; every `promote` of K the partial sum is added to an fp32 accumulator. promote=None never promotes. A model of
    what was observed of Hopper's fp8 wgmma (DeepSeek-V3 technical report, section 3.3.2; DeepGEMM#37), to show what
    promotion is for; it is no contract.
    """
    a, b = a.to(torch.float64), b.to(torch.float64)
    inner = a.shape[1]
    promote = inner if promote is None else promote
    total = a.new_zeros((a.shape[0], b.shape[1]))
    for begin in range(0, inner, promote):
        end = min(begin + promote, inner)
        partial = torch.zeros_like(total)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            products = a[:, start:stop, None] * b[None, start:stop, :]
            largest = torch.maximum(products.abs().amax(1), partial.abs())
            unit = torch.exp2(torch.frexp(largest).exponent.to(torch.float64) - bits)
            partial = ((products / unit[:, None, :]).trunc().sum(1) + (partial / unit).trunc()) * unit
        total = round_to(total + partial, FP32)
    return total
