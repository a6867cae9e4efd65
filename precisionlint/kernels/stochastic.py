"""Stochastic rounding: a number between two of a format's goes to either, with a probability that keeps the mean."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.formats import BF16, E4M3FN, E5M2, FP16

FORMATS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
BLOCK = 4096


@triton.jit
def _stochastic_cast_kernel(
    x, y, seed, size, LEAST: tl.constexpr, MANTISSA: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    value = tl.load(x + index, inside, other=0.0).to(tl.float32)
    draw = tl.load(seed)
    if MANTISSA == 7:
        # bf16 is the upper half of fp32, subnormal numbers included: what the lower half carries over goes up.
        bits = tl.abs(value).to(tl.int32, bitcast=True)
        noise = (tl.randint(draw, index) >> 16).to(tl.int32)
        rounded = ((bits + noise) & -0x10000).to(tl.float32, bitcast=True)
    else:
        # The spacing around |x| is a power of two: x over it is exact, its fraction is the probability of going up.
        exponent = tl.maximum(((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127, LEAST)
        up = ((MANTISSA - exponent + 127) << 23).to(tl.float32, bitcast=True)
        steps = tl.abs(value) * up
        whole = tl.floor(steps)
        steps = whole + tl.where(tl.rand(draw, index) >= 1.0 - (steps - whole), 1.0, 0.0)
        rounded = tl.div_rn(steps, up)
    rounded = tl.minimum(rounded, MAXIMUM)
    finite = tl.abs(value) <= MAXIMUM
    rounded = tl.where(finite, rounded, tl.where(value == value, MAXIMUM, float("nan")))
    rounded = tl.where(value < 0, -rounded, rounded)
    tl.store(y + index, rounded.to(y.dtype.element_ty), inside)


def stochastic_cast(x: Tensor, seed: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x in a narrower dtype, of the same shape, contiguous, rounded stochastically (16 or 24 random bits).

    x is fp32, of any shape and strides; seed is one int64 number in a tensor; dtype is bf16, fp16, float8_e4m3fn or
    float8_e5m2. Numbers beyond the maximum and infinities become the maximum; NaN stays NaN; a number that dtype holds
    stays as it is. The same seed and position give the same random bits. Raises TypeError for other dtypes.
    """
    if x.dtype != torch.float32 or seed.dtype != torch.int64 or dtype not in FORMATS:
        raise TypeError(
            f"x is float32, seed int64 and the result a narrower float, not {x.dtype}, {seed.dtype}, {dtype}"
        )
    target = FORMATS[dtype]
    source = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        _stochastic_cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            source, y, seed, x.numel(),
            LEAST=target.min_exponent, MANTISSA=target.mantissa_bits, MAXIMUM=target.maximum, BLOCK=BLOCK,
        )  # fmt: skip
    return y
