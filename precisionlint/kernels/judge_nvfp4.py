"""Holds NVFP4 codes and their two kinds of scales against what they may be, in float64.

It knows the arithmetic of NVFP4 and the bounds on it; the bounds that it shares with other quantisers are in `judge`.
u is 2^-24, fp32's unit roundoff; e is the relative error of one quotient of the declared class (QUOTIENT_ERROR).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.formats import E2M1, E4M3FN, FP32, decode, round_to
from precisionlint.kernels import judge
from precisionlint.kernels.judge import QUOTIENT_ERROR, Nonfinite, Quotient, U, first_of
from precisionlint.kernels.outcome import Violation
from precisionlint.kernels.reference import NVFP4_BLOCK, block_amax, hadamard, random_hadamard, spread

MAXIMUM = E4M3FN.maximum * E2M1.maximum
"""What the largest magnitude of a tensor is divided by for its scale: 448 * 6 = 2688."""

LAGS = (1, 2, 8, 15, 30, 60, 120, 240, 480, 960, 1920, 3840)
"""Distances, among the 15 elements of each block that share a fraction, at which noise may repeat: within a byte, a
block, and some blocks."""


class Promise(Struct, frozen=True):
    """What a kernel declares, besides the format."""

    quotient: Quotient
    floor: float | None
    """The least largest magnitude that the tensor's scale is made for; None where it is not declared."""
    least_scale: float
    """The least scale of a block; 0 where a block may round to zeros."""
    nonfinite: Nonfinite
    stochastic: bool


def unpacked(codes: Tensor, columns: int) -> Tensor:
    """The E2M1 numbers, (M, columns) float64, of bytes (M, ceil(columns / 2)); the even column is in the low half."""
    both = torch.stack([codes & 0xF, codes >> 4], -1)
    return decode(both.reshape(codes.shape[0], -1)[:, :columns], E2M1)


def transformed(x: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is quantised, and how far a kernel's own may lie from it (absolute); x without signs, which is exact.

    A run of 16 times diag(signs) H / 4: each product is exact, for the factors are +-1 and a power of two; a sum of 16 in
    fp32 in any order errs by at most gamma_15 of the sum of magnitudes (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., section 4.2); one more rounding is left for a factor that is applied at the end.
    Where the magnitudes add up to more than fp32 holds, a sum in some order overflows, and the error is infinite.
    """
    if signs is None:
        return x, torch.zeros_like(x)
    gamma = 16 * U / (1 - 16 * U)
    runs = x.abs().reshape(x.shape[0], -1, 16)
    magnitude = torch.matmul(runs, hadamard(16).abs() / 4).reshape(x.shape)
    drift = gamma * magnitude + 16 * FP32.smallest / 2
    return random_hadamard(x, signs), torch.where(magnitude > FP32.maximum, torch.inf, drift)


def quantized(
    x: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor, promise: Promise, signs: Tensor | None = None
) -> list[Violation]:
    """All clauses: x (M, N), codes (M, N) decoded, scales (M, ceil(N / 16)), tensor_scale a scalar; all float64.

    The tensor's scale differs from amax / 2688 by at most e of it; below fp32's normal numbers, where no floor is
    declared, it may be larger. Given the kernel's own scale of the tensor, a block's is amax / (6 * that) rounded to
    E4M3, after two operations: a relative error of (1 + e)^2 - 1. Given both, a code is a quotient by their product,
    which is rounded once more: e + u, and e u, which is below what float64 keeps of the comparison. A tensor with NaN or
    infinities must come back as no finite numbers where they stood, and nothing else is asked of it.
    """
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        back = codes * spread(scales, NVFP4_BLOCK, x.shape) * tensor_scale
        lost = ~finite & torch.isfinite(back) & (promise.nonfinite == "propagate")
        return first_of(lost, "NaN and infinities", back, [x])
    y, drift = transformed(x, signs)
    if not bool(torch.isfinite(drift).all()):
        return []
    error = QUOTIENT_ERROR[promise.quotient]
    violations = _tensor_scale(y, drift, tensor_scale, promise)
    least = FP32.smallest if promise.quotient == "ieee" else FP32.smallest_normal
    if not bool(torch.isfinite(tensor_scale)) or tensor_scale.item() < least:
        return violations
    violations += _block_scales(
        block_amax(y, NVFP4_BLOCK), block_amax(drift, NVFP4_BLOCK), scales, tensor_scale, promise
    )
    whole = spread(scales, NVFP4_BLOCK, x.shape) * tensor_scale
    violations += first_of((whole == 0) & (codes != 0), "number under a zero scale", codes, [torch.zeros_like(codes)])
    usable = torch.isfinite(whole) & (whole >= least)
    whole = torch.where(usable, whole, 1.0)
    rounds = round_to(whole, FP32) != whole
    errors = torch.where(
        rounds, error + U + FP32.smallest / 2 / whole, judge.quotient_error(y, whole, promise.quotient)
    )
    if promise.stochastic:
        return violations + _stochastic(y, drift, codes, whole, errors, usable)
    return violations + judge.codes_of_elements(y, codes, whole, E2M1, errors, usable, drift)


def _block_scales(
    amax: Tensor, moved: Tensor, scales: Tensor, tensor_scale: Tensor, promise: Promise
) -> list[Violation]:
    """The clause on the E4M3 scales; a block of zeros may have any that is a number.

    Nothing is lost, and a tie goes to the even code, where IEEE divisions by a power of two are exact.
    """
    exact = amax / E2M1.maximum / tensor_scale
    slack = exact * ((1 + QUOTIENT_ERROR[promise.quotient]) ** 2 - 1)
    if promise.quotient == "ieee" and bool(torch.frexp(tensor_scale).mantissa == 0.5):
        slack = torch.where(round_to(exact, FP32) * E2M1.maximum * tensor_scale == amax, 0.0, slack)
    slack = slack + torch.where(slack > 0, (moved + FP32.smallest) / E2M1.maximum / tensor_scale, 0.0)
    low, high = (
        round_to((exact + side).clamp(min=promise.least_scale), E4M3FN, overflow="saturate") for side in (-slack, slack)
    )
    wrong = ~((scales >= low) & (scales <= high)) & ~((amax == 0) & torch.isfinite(scales))
    excess = torch.maximum(scales - high, low - scales) / high.clamp(min=E4M3FN.smallest)
    return first_of(wrong, "scale of a block", scales, (low, high), excess, " of the scale")


def _tensor_scale(y: Tensor, drift: Tensor, scale: Tensor, promise: Promise) -> list[Violation]:
    amax, floor = y.abs().max() if y.numel() else y.new_zeros(()), promise.floor
    if y.numel() == 0 or (bool(amax == 0) and floor is None):
        return first_of(~torch.isfinite(scale), "scale of the tensor", scale, [torch.ones_like(scale)])
    moved = drift.max()
    low, high = ((amax + move).clamp(min=floor or 0.0) / MAXIMUM for move in (-moved, moved))
    error = QUOTIENT_ERROR[promise.quotient]
    low, high = low * (1 - error) - 2 * FP32.smallest, high * (1 + error) + 2 * FP32.smallest
    if floor is None and bool(high < FP32.smallest_normal):
        high = torch.full_like(high, FP32.maximum)
    wrong = ~((scale >= low) & (scale <= high))
    return first_of(wrong, "scale of the tensor", scale, (low, high), (scale / high - 1).abs(), " of the scale")


def _stochastic(
    y: Tensor, drift: Tensor, codes: Tensor, whole: Tensor, errors: Tensor, usable: Tensor
) -> list[Violation]:
    """Whether each element went to a neighbour of its quotient, within the errors, and as often as it should.

    Where all but the first block, which sets the scale of the tensor, and the first of each 16, which sets the block's,
    hold one number, the share that went up and its independence are judged as in `judge.stochastically_rounded`.
    """
    low, high = ((y.abs() + move) / whole * factor for move, factor in ((-drift, 1 - errors), (drift, 1 + errors)))
    noise = torch.zeros_like(y)
    low = round_to(low.clamp(min=0.0), E2M1, mode="stochastic", overflow="saturate", noise=noise)
    high = round_to(high, E2M1, mode="stochastic", overflow="saturate", noise=noise + (1 - 2.0**-53))
    size = codes.abs()
    signed = (torch.signbit(codes) == torch.signbit(y)) | (size == 0) | (y.abs() < drift)
    wrong = usable & ~((size >= low) & (size <= high) & signed)
    violations = first_of(wrong, "neighbour", codes, [torch.copysign(each, y) for each in (low, high)])
    if violations or y.shape[1] % 16 or y.numel() < 2**14:
        return violations
    alike, quotient, size = (each.reshape(-1, 16)[1:, 1:].reshape(-1) for each in (y, (y / whole).abs(), size))
    if not bool((alike == alike[0]).all() & (quotient == quotient[0]).all()):
        return violations
    below = round_to(quotient[:1], E2M1, mode="toward-zero").item()
    above = round_to(quotient[:1], E2M1, mode="stochastic", noise=torch.full((1,), 1 - 2.0**-53).double()).item()
    if above == below:
        return violations
    up = (size == above).double()
    share = (quotient[0].item() - below) / (above - below)
    return violations + judge.as_often_as_it_should(up, share, LAGS)


def packed_codes(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs with two-in-a-byte E2M1 of torch's own dtype as plain bytes."""
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    return tuple(
        each.view(torch.uint8) if isinstance(each, Tensor) and packed and each.dtype == packed else each
        for each in outputs
    )
