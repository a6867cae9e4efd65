"""Holds what a kernel returned against what it may return, element by element, in float64.

It knows numbers, blocks and bounds; which inputs to try and how a launcher is run are elsewhere. Each bound is derived
where it is used. u is 2^-24, fp32's unit roundoff.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from precisionlint.formats import FP32, Format, Overflow, decode, round_to, spacing
from precisionlint.kernels.outcome import Violation
from precisionlint.kernels.reference import (
    MX_BLOCK,
    Block,
    MxRounding,
    ScaleKind,
    block_amax,
    mx_scale,
    power_of_two_scale,
    spread,
)

Quotient = Literal["ieee", "full", "reciprocal"]
Nonfinite = Literal["propagate", "unspecified"]

U = FP32.unit_roundoff

QUOTIENT_ERROR: dict[Quotient, float] = {"ieee": U, "full": 4 * U, "reciprocal": 9.25 * U}
"""The relative error that a quotient x / scale may have before it is rounded to the element format.

ieee: one rounded division, u. full: Triton's `/`, PTX's div.full.f32, at most 2 ulp (PTX ISA, `div`), and an ulp is at
most 2u of the number. reciprocal: x times an inverse that was computed on its own, maximum / amax or 1 / scale, while
the stored scale is amax / maximum: two div.full (4u each), one product (u), and their products of second order (less
than 0.25u together).
"""

LARGEST_FLOOR = 1e-4
"""The largest scale that may come from a floor, for a hint: 1e-2 over E2M1's maximum is above those in use."""


class Scaling(Struct, frozen=True):
    """What a quantising kernel promises, besides the shape of its blocks."""

    target: Format
    kind: ScaleKind
    quotient: Quotient
    floor: float | None
    nonfinite: Nonfinite


def first_of(
    wrong: Tensor, clause: str, got: Tensor, allowed: Sequence[Tensor], excess: Tensor | None = None, unit: str = ""
) -> list[Violation]:
    """The violation that a mask of wrong elements amounts to, or none; `allowed` is one tensor, or two for a range."""
    count = int(wrong.sum())
    if not count:
        return []
    index = tuple(int(each) for each in wrong.nonzero()[0])
    limits = [f"{bound[index].item():.9g}" for bound in allowed]
    text = limits[0] if len(set(limits)) == 1 else f"{limits[0]} to {limits[1]}"
    worst = "" if excess is None else f"{excess[wrong].max().item():.3g}{unit}"
    return [Violation(clause, f"{got[index].item():.9g}", text, count, wrong.numel(), index, worst)]


def same_structure(
    outputs: Sequence[Tensor], expected: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
) -> list[Violation]:
    """Whether a launcher returned the tensors that its contract names, by (name, shape, dtype)."""
    if len(outputs) != len(expected) or not all(isinstance(each, Tensor) for each in outputs):
        names = ", ".join(name for name, _, _ in expected)
        kinds = ", ".join(type(each).__name__ for each in outputs)
        return [Violation("returns", f"({kinds})", f"{len(expected)} tensors ({names})")]
    found = []
    for output, (name, shape, dtype) in zip(outputs, expected, strict=True):
        if tuple(output.shape) != shape:
            found.append(Violation(f"shape of {name}", str(tuple(output.shape)), str(shape)))
        if output.dtype != dtype:
            found.append(Violation(f"dtype of {name}", str(output.dtype), str(dtype)))
    return found


def scales_of_blocks(amax: Tensor, sound: Tensor, scales: Tensor, scaling: Scaling) -> list[Violation]:
    """The scale clause; `amax` is over the numbers of each block, `sound` is where it has no NaN and no infinity.

    Let e = amax / maximum, amax raised to the declared floor. A power of two must be the smallest s with s >= e. An
    fp32 scale may differ from e by the error of one division or of one product with a rounded 1 / maximum: at most
    4u * e for 'full' and 'reciprocal' (2 ulp; the product has 2u + u^2), u * e for 'ieee'; in fp32's subnormals by
    half of their spacing, or twice it.

    Where no floor is declared and e is not a normal fp32 number, each finite scale that is not below e within that
    error is allowed, and 0 for a block of zeros: on the way back it is right. A block that is not sound may have any
    scale that is not finite, or not below e within that error.
    """
    relative = U if scaling.quotient == "ieee" else 4 * U
    raised = amax if scaling.floor is None else amax.clamp(min=scaling.floor)
    exact = raised / scaling.target.maximum
    slack = relative * exact + (0.5 if scaling.quotient == "ieee" else 2) * FP32.smallest
    if scaling.kind == "power-of-two":
        exact = power_of_two_scale(raised, scaling.target)
        slack = torch.zeros_like(exact)
    low, high = exact - slack, exact + slack
    free = torch.zeros_like(sound) if scaling.floor is not None else exact < FP32.smallest_normal
    high = torch.where(free, FP32.maximum, high)
    low = torch.where(free, low.clamp(min=0.0), low)
    within = (scales >= low) & (scales <= high)
    if scaling.kind == "power-of-two":
        within &= (scales == 0) | (torch.frexp(scales).mantissa == 0.5)
    within |= ~sound & (~torch.isfinite(scales) | (scales >= low))
    excess = torch.maximum(scales - high, low - scales).abs() / exact.clamp(min=FP32.smallest)
    violations = first_of(~within, "scale", scales, (low, high), excess, " of the scale")
    floor = None if scaling.floor is not None else _floor_in(scales[~within], exact[~within])
    if floor is None:
        return violations
    floor *= scaling.target.maximum
    hint = f"a kernel that takes magnitudes below {floor:.4g} for {floor:.4g} declares it: --option floor={floor:.4g}"
    return [replace(each, hint=hint) for each in violations]


def _floor_in(scales: Tensor, exact: Tensor) -> float | None:
    """The scale that stands for all small ones, where each of these is that one and each is small."""
    if not scales.numel() or bool((scales != scales[0]).any()):
        return None
    return scales[0].item() if bool((exact * 2 < scales).all() and scales[0] < LARGEST_FLOOR) else None


def quotient_error(x: Tensor, scales: Tensor, quotient: Quotient) -> Tensor:
    """The relative error that each quotient x / scale may have; 0 where the division is exact. All float64."""
    size = x.abs()
    exact = torch.frexp(scales).mantissa == 0.5
    if quotient == "ieee":
        rounded = round_to(torch.where(scales > 0, size / scales, 0.0), FP32)
        exact |= rounded * scales == size
    return torch.where(exact, torch.zeros_like(size), QUOTIENT_ERROR[quotient])  # float64: 1 + u needs it


def codes_of_elements(
    x: Tensor, codes: Tensor, scales: Tensor, target: Format, error: Tensor, judged: Tensor, drift: Tensor | None = None
) -> list[Violation]:
    """The code clause: each code, given the kernel's own scale s, is one that x / s with its error may round to.

    `x`, `codes` (decoded), `scales` (one for each element) and `error` (the relative error q of the quotient) are
    float64 of one shape. Code c with the midpoints m- and m+ to its neighbours is allowed where |x| (1 + q) >= m- s and
    |x| (1 - q) <= m+ s. x and s have at most 24 bits, a midpoint 5, 1 + q at most 27, so each side is exact in float64.
    Where q is 0, a midpoint itself belongs to the even code. The largest code has no upper midpoint: saturation. The
    sign of a zero is free. `drift` is an absolute error of x itself, where x is not the kernel's input but computed
    from it: within it a sign is free too.
    """
    table = decode(torch.arange(target.top_code + 1), target)
    infinity = torch.tensor([torch.inf], dtype=torch.float64)
    middle = (table[1:] + table[:-1]) / 2
    magnitude = codes.abs()
    known = torch.isfinite(codes) & judged
    position = torch.searchsorted(table, torch.where(known, magnitude, 0.0))
    below = torch.cat([-infinity, middle])[position] * scales
    above = torch.cat([middle, infinity])[position] * scales
    above = torch.where(torch.isnan(above), torch.inf, above)

    size = x.abs()
    drift = torch.zeros_like(size) if drift is None else drift
    low, high = (size - drift).clamp(min=0.0) * (1 - error), (size + drift) * (1 + error)
    odd = position % 2 == 1
    tie = (error == 0) & (drift == 0) & odd & ((size == below) | (size == above))
    signed = (torch.signbit(codes) == torch.signbit(x)) | (magnitude == 0) | (size < drift)
    wrong = judged & ~((high >= below) & (low <= above) & ~tie & signed & known)

    shown = []
    for side in (low, high):
        nearest = torch.where(judged & (scales > 0), side / scales, 0.0)
        shown.append(round_to(nearest, target, overflow="saturate"))
    steps = torch.maximum(
        torch.searchsorted(table, shown[0]) - position, position - torch.searchsorted(table, shown[1])
    )
    allowed = [torch.copysign(side, x) for side in shown]
    return first_of(wrong, "code", codes, allowed, steps.clamp(min=0).double(), " codes")


def quantized(x: Tensor, codes: Tensor, scales: Tensor, block: Block, scaling: Scaling) -> list[Violation]:
    """All clauses of scaled quantisation: x (M, N), codes (M, N) decoded, scales (row blocks, column blocks); float64.

    With policy 'propagate', NaN and infinities must come back as no finite number, and other elements of their block
    either likewise or quantised with the block's scale; 'unspecified' leaves such blocks out. div.full.f32 promises its
    2 ulp for divisors that are normal numbers: with smaller scales, codes are judged for 'ieee' alone.
    """
    amax = block_amax(x, block)
    each_scale = spread(scales, block, x.shape)
    sound = torch.isfinite(amax)
    finite_block = spread(sound, block, x.shape)
    finite = torch.isfinite(x)
    plain = torch.where(finite, x, 0.0)
    least = FP32.smallest if scaling.quotient == "ieee" else FP32.smallest_normal
    usable = torch.isfinite(each_scale) & (each_scale >= least)
    back = codes * each_scale
    zero = finite_block & (each_scale == 0)
    numbers = block_amax(plain, block)
    judged_blocks = sound if scaling.nonfinite == "unspecified" else torch.ones_like(sound)
    violations = scales_of_blocks(numbers, sound, torch.where(judged_blocks, scales, torch.nan), scaling)
    violations += first_of(zero & (back != 0), "number under a zero scale", back, [torch.zeros_like(back)])
    judged = finite_block & usable
    if scaling.nonfinite == "propagate":
        violations += first_of(~finite & torch.isfinite(back), "NaN and infinities", back, [x])
        judged |= ~finite_block & finite & torch.isfinite(back) & usable
    each_scale = torch.where(usable, each_scale, 1.0)
    error = quotient_error(plain, each_scale, scaling.quotient)
    return violations + codes_of_elements(plain, codes, each_scale, scaling.target, error, judged)


def mx_quantized(
    x: Tensor, codes: Tensor, scales: Tensor, target: Format, rounding: MxRounding, nonfinite: Nonfinite
) -> list[Violation]:
    """All clauses of MX quantisation: x (M, N), codes (M, N) and scales (M, ceil(N / 32)) decoded; float64.

    A shared scale is a power of two that follows from the largest magnitude by comparing bits: there is nothing to
    allow; only a block of zeros may have any scale that is a number. Division by it is exact, so each code is the
    nearest one, ties to even, or the largest one where the quotient lies beyond it.
    """
    amax = block_amax(x, MX_BLOCK)
    sound = torch.isfinite(amax)
    expected = mx_scale(torch.where(sound, amax, 0.0), target, rounding)
    right = (scales == expected) | ((amax == 0) & torch.isfinite(scales)) | ~sound
    violations = first_of(~right, "scale", scales, [expected], (scales / expected - 1).abs(), " of the scale")
    each_scale = spread(scales, MX_BLOCK, x.shape)
    finite = torch.isfinite(x)
    if nonfinite == "propagate":
        violations += first_of(~finite & torch.isfinite(codes * each_scale), "NaN and infinities", codes, [x])
    judged = spread(sound, MX_BLOCK, x.shape) & torch.isfinite(each_scale)
    plain, usable = torch.where(finite, x, 0.0), torch.where(judged, each_scale, 1.0)
    return violations + codes_of_elements(plain, codes, usable, target, torch.zeros_like(plain), judged)


def rounded(
    exact: Tensor, error: Tensor, got: Tensor, target: Format, overflow: Overflow, clause: str
) -> list[Violation]:
    """Whether each output is what a number within `error` (absolute) of `exact` may round to in `target`.

    Rounding is monotonous, so that is the range from the rounded lower end to the rounded upper one. Where `exact` is
    NaN or infinite the output must be what that rounds to. All float64. The sign of a zero is free.
    """
    special = ~torch.isfinite(exact)
    plain = torch.where(special, 0.0, exact)
    low = round_to(plain - error, target, overflow=overflow)
    high = round_to(plain + error, target, overflow=overflow)
    # Beyond the range of a format without infinities both ends are NaN, and so must the output be.
    within = ((got >= low) | torch.isnan(low)) & ((got <= high) | torch.isnan(high)) & ~torch.isnan(got)
    within |= torch.isnan(got) & (torch.isnan(low) | torch.isnan(high))
    expected = round_to(exact, target, overflow=overflow)
    same = (got == expected) | (torch.isnan(got) & torch.isnan(expected))
    low, high = torch.where(special, expected, low), torch.where(special, expected, high)
    excess = (torch.maximum(got - high, low - got) / spacing_of(plain, target)).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    return first_of(torch.where(special, ~same, ~within), clause, got, (low, high), excess, " spacings")


def spacing_of(numbers: Tensor, target: Format) -> Tensor:
    """`spacing` with the maximum's beyond the maximum."""
    return spacing(numbers.clamp(-target.maximum, target.maximum), target)


def matmul_error(magnitude: Tensor, inner: int) -> Tensor:
    """How far a product may lie from the float64 one before the output is rounded: gamma_n |A| |B|.

    `magnitude` is |A| |B|, the product of the dequantised magnitudes; `inner` is K. Two FP8 numbers multiply exactly in
    fp32. A sum of 128 products has 127 additions; a partial sum is multiplied by two scales, or by their product, which
    is rounded too; ceil(K / 128) additions go into the accumulator; one more rounding is left for a scale that is
    folded in elsewhere. So each product passes through at most n = 127 + 3 + ceil(K / 128) roundings, and the sum
    differs by gamma_n |A| |B| with gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical Algorithms,
    2nd ed., section 3.1), in whatever order it is added. The float64 reference's own error, gamma_K with 2^-53, is
    added. Subnormal intermediate results round by up to half of 2^-149 each: n of these are added as well.
    """
    n = 127 + 3 + -(-inner // 128)
    gamma = n * U / (1 - n * U) + inner * 2.0**-53 / (1 - inner * 2.0**-53)
    return gamma * magnitude + n * FP32.smallest / 2


def narrow_error(magnitude: Tensor, promotion: float) -> Tensor:
    """How much more a sum may lose in a tensor core that keeps 14 bits and is promoted every so many of K.

    The model of `reference.matmul_with_narrow_accumulator`: in a step of 32, each of the 32 products and the sum so far
    is cut to a multiple of 2^(e - 14), where 2^(e - 1) <= L < 2^e for the largest L of them; that is less than 2^-13 L,
    and L is at most the sum of the magnitudes between two promotions. So promotion / 32 steps lose at most
    33 (promotion / 32) 2^-13 of it, and the whole product that share of |A| |B|, which is `magnitude`.
    """
    return 33 * max(promotion / 32, 1.0) * 2.0**-13 * magnitude


FALSE_ALARM = 1e-9
"""The probability, at most, with which one statistical clause calls a correct kernel wrong."""

RANDOM_BITS = 8
"""The least number of random bits an element that counts as stochastic rounding: gfloat's text calls biases with 8
negligible. With n bits a probability is off by at most 2^-n."""

LAGS = (1, 2, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Distances at which noise that starts anew for each block, row or program would repeat."""


def stochastically_rounded(x: Tensor, got: Tensor, target: Format) -> list[Violation]:
    """Whether each number went to one of its two neighbours in `target`, as often as it should, independently.

    All float64. A number that the format holds stays, beyond the maximum it becomes the maximum. Where x holds one
    number N times, with fraction f between its neighbours, the share that went up differs from f by at most
    sqrt(ln(2 / p) / (2 N)) + 2^-n: Hoeffding's inequality with p = FALSE_ALARM, and n = RANDOM_BITS. For each lag,
    the share of disjoint pairs that went the same way differs as little from f^2 + (1 - f)^2, twice the bias allowed.
    """
    noise = torch.zeros_like(x)
    low = round_to(x, target, mode="stochastic", overflow="saturate", noise=noise)
    high = round_to(x, target, mode="stochastic", overflow="saturate", noise=noise + (1 - 2.0**-53))
    neighbour = (got == low) | (got == high) | (torch.isnan(x) & torch.isnan(got))
    violations = first_of(~neighbour, "neighbour", got, (low, high))
    if violations or x.numel() < 2**14 or not bool((x == x.view(-1)[0]).all()) or bool((low == high).any()):
        return violations
    share = ((x - low) / (high - low)).view(-1)[0].item()
    return violations + as_often_as_it_should((got.view(-1) == high.view(-1)).double(), share, LAGS)


def as_often_as_it_should(up: Tensor, share: float, lags: Sequence[int]) -> list[Violation]:
    """Whether elements with one fraction `share` went up (1.0) that often, and independently at these distances.

    The bounds are those of `stochastically_rounded`; `up` is (elements,), float64.
    """
    violations = []
    chance, bias = math.log(2 / FALSE_ALARM) / 2, 2.0**-RANDOM_BITS
    slack = math.sqrt(chance / up.numel()) + bias
    if abs(up.mean().item() - share) > slack:
        allowed = f"{share - slack:.4f} to {share + slack:.4f}"
        violations.append(Violation("share that goes up", f"{up.mean().item():.4f}", allowed))
    alike = share**2 + (1 - share) ** 2
    for lag in lags:
        pairs = up[: up.numel() // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
        same = (pairs[:, 0] == pairs[:, 1]).double().mean().item()
        slack = math.sqrt(chance / (up.numel() // 2)) + 2 * bias
        if abs(same - alike) > slack:
            allowed = f"{alike - slack:.4f} to {alike + slack:.4f}"
            violations.append(Violation(f"pairs at distance {lag} that go the same way", f"{same:.4f}", allowed))
    return violations
