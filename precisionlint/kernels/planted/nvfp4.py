"""NVFP4 quantisers, each with one thing done in another way."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted
from precisionlint.kernels.reference import NVFP4_AMAX_FLOOR


@triton.jit
def _transformed(value, signs, WAY: tl.constexpr, WIDTH: tl.constexpr):
    """Runs of 16 in a row times diag(signs) H / 4, as four rounds of sums and differences."""
    i = tl.arange(0, 16)
    sign = tl.load(signs + i)
    runs = tl.reshape(value, [WIDTH // 16, 16])
    if WAY == "signs in reverse":
        sign = tl.load(signs + 15 - i)
    if (WAY != "signs forgotten") & (WAY != "signs after the transform"):
        runs = runs * sign[None, :]
    for stage in tl.static_range(4):
        pairs = tl.reshape(runs, [WIDTH // 16 * (8 >> stage), 2, 1 << stage])
        low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
        both = tl.join(low + high, low - high)
        runs = tl.reshape(tl.permute(both, (0, 2, 1)), [WIDTH // 16, 16])
    if WAY == "signs after the transform":
        runs = runs * sign[None, :]
    if WAY != "transform not normalised":
        runs = runs * 0.25
    if WAY == "transform rounded to bf16":
        runs = runs.to(tl.bfloat16).to(tl.float32)
    return tl.reshape(runs, [WIDTH])


@triton.jit
def _tensor_scale(largest, bad, WAY: tl.constexpr, FLOOR: tl.constexpr):
    """The scale of the tensor, and the magnitude that it was made for."""
    raised = tl.maximum(largest, FLOOR)
    if WAY == "no floor":
        raised = largest
    whole = raised / 2688.0
    if WAY == "E4M3's maximum alone":
        whole = raised / 448.0
    if WAY == "scale of the tensor in bf16":
        whole = whole.to(tl.bfloat16).to(tl.float32)
    if WAY == "inverse of its own":
        whole = 1.0 / (2688.0 / raised)
    if WAY != "NaN dropped":
        whole = tl.where((bad != 0) | (largest == float("inf")), float("nan"), whole)
    return whole, raised


@triton.jit
def _block_scales(runs, whole, raised, WAY: tl.constexpr, WIDTH: tl.constexpr):
    """The scale of each block before it is rounded, in E4M3, and as that is read back."""
    amax = tl.max(tl.abs(runs), 1)
    if WAY == "amax without abs":
        amax = tl.maximum(tl.max(runs, 1), 0.0)
    if WAY == "groups of 32":
        wide = tl.max(tl.reshape(amax, [WIDTH // 32, 2]), 1)
        amax = tl.reshape(tl.broadcast_to(wide[:, None], [WIDTH // 32, 2]), [WIDTH // 16])
    exact = amax / 6.0 / whole
    if WAY == "inverse of its own":
        exact = amax * (1.0 / 6.0) * (2688.0 / raised)
    if WAY == "a maximum of 8":
        exact = amax / 8.0 / whole
    if WAY == "a least scale of 2^-6":
        exact = tl.maximum(exact, 0.015625)
    if WAY == "scale truncated":
        scale = exact.to(tl.float8e4nv, fp_downcast_rounding="rtz")
    else:
        scale = exact.to(tl.float8e4nv)
    rounded = scale.to(tl.float32)
    if WAY == "subnormal scales flushed":
        rounded = tl.where(rounded < 0.015625, 0.0, rounded)
        scale = rounded.to(tl.float8e4nv)
    return exact, scale, rounded


@triton.jit
def _quotients(runs, exact, rounded, whole, WAY: tl.constexpr):
    """The magnitudes that are rounded to codes."""
    if WAY == "divided by the scale before rounding":
        rounded = exact
    both = rounded * whole
    if WAY == "scale of the tensor forgotten":
        both = rounded
    quotient = tl.abs(runs) / both[:, None]
    if WAY == "inverse of its own":
        quotient = tl.abs(runs) * (1.0 / both)[:, None]
    if WAY != "a block of zeros divided":
        quotient = tl.where((both == 0.0)[:, None], 0.0, quotient)
    if WAY == "quotient in bf16":
        quotient = quotient.to(tl.bfloat16).to(tl.float32)
    return quotient


@triton.jit
def _noisy(quotient, seed, row, column, N, WAY: tl.constexpr, WIDTH: tl.constexpr):
    """The magnitudes, rounded stochastically."""
    place = row * N + column
    if WAY == "noise anew for each row":
        place = column
    if WAY == "one draw for a byte":
        place = (row * N + column) // 2
    noise = tl.reshape(tl.rand(tl.load(seed), place), [WIDTH // 16, 16])
    spacing = tl.where(quotient < 2.0, 0.5, tl.where(quotient < 4.0, 1.0, 2.0))
    if WAY == "one spacing for all":
        spacing = spacing * 0.0 + 0.5
    steps = quotient / spacing
    if WAY == "nearest":
        noise = noise * 0.0 + 0.5
    if WAY == "noise of half a step":
        noise = noise * 0.5
    if WAY == "noise of either sign":
        quotient = tl.floor(steps + noise - 0.5) * spacing
    else:
        quotient = tl.floor(steps + noise) * spacing
    return quotient


@triton.jit
def _codes(quotient, runs, WAY: tl.constexpr):
    """The code of each magnitude, to nearest even, with the sign of its number."""
    code = (quotient > 0.25).to(tl.int32) + (quotient >= 0.75).to(tl.int32) + (quotient > 1.25).to(tl.int32)
    code += (quotient >= 1.75).to(tl.int32) + (quotient > 2.5).to(tl.int32) + (quotient >= 3.5).to(tl.int32)
    code += (quotient > 5.0).to(tl.int32)
    if WAY == "half rounded up":
        code += ((quotient == 0.25) | (quotient == 1.25) | (quotient == 2.5) | (quotient == 5.0)).to(tl.int32)
    if WAY == "code 8 for what saturates":
        code += (quotient > 6.0).to(tl.int32)
    if WAY == "the largest code is never used":
        code = tl.minimum(code, 6)
    if WAY != "sign lost":
        code = code | tl.where(runs < 0, 8, 0)
    return code


@triton.jit
def _quantize_kernel(
    x, signs, seed, codes, scales, tensor_scale, M, N, x_row, x_column, WAY: tl.constexpr, FLOOR: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: all rows twice, first for the largest magnitude, then to quantise; WIDTH holds a whole row."""
    column = tl.arange(0, WIDTH)
    groups = tl.cdiv(N, 16)
    largest = tl.zeros([], tl.float32)
    bad = tl.zeros([], tl.int32)
    for row in range(M):
        start = tl.zeros([], tl.int64) + row
        if WAY == "int32 offsets":
            start = tl.zeros([], tl.int32) + row
        value = tl.load(x + start * x_row + column * x_column, column < N, other=0.0).to(tl.float32)
        bad = bad | tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1, 0)
        if HADAMARD:
            value = _transformed(value, signs, WAY, WIDTH)
        largest = tl.maximum(largest, tl.max(tl.abs(value), 0))
    whole, raised = _tensor_scale(largest, bad, WAY, FLOOR)
    stored = whole
    if WAY == "stores the inverse scale":
        stored = 1.0 / whole
    tl.store(tensor_scale, stored)

    for row in range(M):
        start = tl.zeros([], tl.int64) + row
        value = tl.load(x + start * x_row + column * x_column, column < N, other=0.0).to(tl.float32)
        if HADAMARD:
            value = _transformed(value, signs, WAY, WIDTH)
        runs = tl.reshape(value, [WIDTH // 16, 16])
        exact, scale, rounded = _block_scales(runs, whole, raised, WAY, WIDTH)
        group = tl.arange(0, WIDTH // 16)
        tl.store(scales + start * groups + group, scale, group < groups)
        quotient = _quotients(runs, exact, rounded, whole, WAY)
        if STOCHASTIC:
            quotient = _noisy(quotient, seed, row, column, N, WAY, WIDTH)
        code = _codes(quotient, runs, WAY)
        even, odd = tl.split(tl.reshape(code, [WIDTH // 2, 2]))
        if WAY == "halves of a byte swapped":
            byte = odd | (even << 4)
        elif WAY == "even columns alone":
            byte = even | (even << 4)
        else:
            byte = even | (odd << 4)
        pair = tl.arange(0, WIDTH // 2)
        width = tl.cdiv(N, 2)
        if WAY == "half a row rounded down":
            width = N // 2
        tl.store(codes + start * tl.cdiv(N, 2) + pair, byte.to(tl.uint8), pair < width)


def _quantize(x: Tensor, *given: Tensor, way: str, hadamard: bool, stochastic: bool) -> tuple[Tensor, Tensor, Tensor]:
    m, n = x.shape
    more = iter(given)
    codes = torch.empty((m, triton.cdiv(n, 2)), dtype=torch.uint8, device=x.device)
    scales = torch.empty((m, triton.cdiv(n, 16)), dtype=torch.float8_e4m3fn, device=x.device)
    tensor_scale = torch.empty((), device=x.device)
    _quantize_kernel[(1,)](
        x, next(more) if hadamard else None, next(more) if stochastic else None, codes, scales, tensor_scale, m, n,
        x.stride(0), x.stride(1), WAY=way, FLOOR=NVFP4_AMAX_FLOOR, HADAMARD=hadamard, STOCHASTIC=stochastic,
        WIDTH=max(32, triton.next_power_of_2(n)),
    )  # fmt: skip
    return codes, scales, tensor_scale


FAULTS = {
    "int32 offsets": "row * stride wraps beyond 2^31 (vllm#53390)",
    "no floor": "a tensor of zeros gets the scale 0, and small ones a subnormal one (ao#4713)",
    "E4M3's maximum alone": "448 for 448 * 6",
    "scale of the tensor in bf16": "the scale is rounded to 8 bits",
    "NaN dropped": "NaN becomes 0",
    "stores the inverse scale": "the scale is for the way there",
    "amax without abs": "negative numbers do not count",
    "groups of 32": "MXFP4's groups for NVFP4's",
    "a maximum of 8": "E2M1's 6 taken for 8",
    "scale truncated": "the block's scale is rounded toward zero",
    "subnormal scales flushed": "small blocks become zeros",
    "divided by the scale before rounding": "the codes are for a scale that is not stored",
    "scale of the tensor forgotten": "divided by the block's scale alone",
    "a block of zeros divided": "0 / 0 (ao#4713)",
    "quotient in bf16": "rounded twice, first to 8 bits",
    "half rounded up": "midpoints go away from zero",
    "code 8 for what saturates": "a quotient above 6 becomes minus zero",
    "the largest code is never used": "4 for 6",
    "sign lost": "negative numbers come back positive",
    "halves of a byte swapped": "columns are exchanged in pairs",
    "even columns alone": "odd columns repeat their neighbour",
    "half a row rounded down": "the last column of an odd number stays unwritten (FBGEMM#6159)",
}

STOCHASTIC_FAULTS = {
    "nearest": "no noise at all",
    "noise anew for each row": "the same noise in each row",
    "one draw for a byte": "two neighbours share their noise",
    "one spacing for all": "above 2 the codes lie further apart",
    "noise of half a step": "goes up too rarely",
    "noise of either sign": "leaves for a third neighbour, and down too often",
}

HADAMARD_FAULTS = {
    "signs forgotten": "a transform that is the same for all",
    "signs after the transform": "H diag(signs) for diag(signs) H",
    "signs in reverse": "each sign meets another element",
    "transform not normalised": "four times the numbers",
    "transform rounded to bf16": "8 bits before the largest magnitude is taken",
}


def planted() -> list[Planted]:
    """Every fault and every correct style of this module."""
    floor = ("floor", repr(NVFP4_AMAX_FLOOR))
    found = []
    for faults, hadamard, stochastic in (
        (FAULTS, False, False),
        (STOCHASTIC_FAULTS, False, True),
        (HADAMARD_FAULTS, True, False),
    ):
        options = (
            floor,
            ("hadamard", "16" if hadamard else "none"),
            ("rounding", "stochastic" if stochastic else "nearest"),
        )
        kind = "nvfp4 stochastic" if stochastic else "nvfp4"
        for way, fault in {**faults, f"by rows{' after sums and differences' if hadamard else ''}": ""}.items():
            launch = partial(_quantize, way=way, hadamard=hadamard, stochastic=stochastic)
            found.append(Planted(f"{kind}: {way}", launch, "quantize_nvfp4", options, fault))
    for way, option in (
        ("inverse of its own", ("quotient", "reciprocal")),
        ("a least scale of 2^-6", ("least-scale", "0.015625")),
    ):
        launch = partial(_quantize, way=way, hadamard=False, stochastic=False)
        found.append(Planted(f"nvfp4: {way}", launch, "quantize_nvfp4", (floor, option)))
    return found
