"""The cast kernel: one floating-point type into another, saturating for FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _cast_kernel(source, target, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    value = tl.load(source + index, inside)
    # Through fp32, which holds each of the types: bf16 and fp8 have no direct conversion into one another.
    tl.store(target + index, value.to(tl.float32).to(target.dtype.element_ty), inside)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another floating-point dtype, of the same shape, contiguous; rounded to nearest even, once.

    x is fp32, fp16, bf16, float8_e4m3fn or float8_e5m2, of any shape and strides, and so is dtype. To FP8, numbers
    beyond the maximum and infinities become the maximum; NaN stays NaN. Raises TypeError for another dtype.
    """
    for each in (x.dtype, dtype):
        if each not in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            raise TypeError(f"cast does not know {each}")
    source = x.contiguous()
    target = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        _cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](source, target, x.numel(), BLOCK=BLOCK)
    return target
