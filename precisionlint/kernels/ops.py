"""The bundled kernels as torch ops, `torch.ops.precisionlint.*`: with shapes for the compiler, gradients and autocast.

It knows torch.library, not how a kernel works. Quantisers, dequantisation and products of FP8 take what they are given
under autocast: they have dtypes of their own, and their sums are fp32. FP8 codes have no gradient, so neither have these;
`blockscaled_linear` has one, made of the same kernels, and is what a layer calls. `cast` hands a gradient back in the
dtype of its input, as torch's own `.to` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from precisionlint.kernels import cast as casts
from precisionlint.kernels import gemm, mx, nvfp4, quantize, stochastic
from precisionlint.kernels.reference import MxRounding

FP8 = torch.float8_e4m3fn
DEVICES = ("CPU", "CUDA")
"""The autocasts under which the ops are registered."""


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


@torch.library.custom_op("precisionlint::cast", mutates_args=())
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`kernels.cast.cast`."""
    return casts.cast(x, dtype)


@torch.library.custom_op("precisionlint::stochastic_cast", mutates_args=())
def stochastic_cast(x: Tensor, seed: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`kernels.stochastic.stochastic_cast`."""
    return stochastic.stochastic_cast(x, seed, dtype=dtype)


@torch.library.custom_op("precisionlint::quantize_tensor", mutates_args=())
def quantize_tensor(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`kernels.quantize.quantize_tensor`."""
    return quantize.quantize_tensor(x, dtype=dtype, power_of_two=power_of_two)


@torch.library.custom_op("precisionlint::quantize_row", mutates_args=())
def quantize_row(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`kernels.quantize.quantize_row`."""
    return quantize.quantize_row(x, dtype=dtype, power_of_two=power_of_two)


@torch.library.custom_op("precisionlint::quantize_1x128", mutates_args=())
def quantize_1x128(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`kernels.quantize.quantize_1x128`."""
    return quantize.quantize_1x128(x, dtype=dtype, power_of_two=power_of_two)


@torch.library.custom_op("precisionlint::quantize_128x128", mutates_args=())
def quantize_128x128(x: Tensor, dtype: torch.dtype = FP8, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`kernels.quantize.quantize_128x128`."""
    return quantize.quantize_128x128(x, dtype=dtype, power_of_two=power_of_two)


@torch.library.custom_op("precisionlint::quantize_mx", mutates_args=())
def quantize_mx(x: Tensor, dtype: torch.dtype = FP8, rounding: str = "floor") -> tuple[Tensor, Tensor]:
    """`kernels.mx.quantize_mx`."""
    words: dict[str, MxRounding] = {"floor": "floor", "ceil": "ceil", "rceil": "rceil", "even": "even"}
    return mx.quantize_mx(x, dtype=dtype, rounding=words[rounding])


@torch.library.custom_op("precisionlint::quantize_nvfp4", mutates_args=())
def quantize_nvfp4(x: Tensor, signs: Tensor | None = None, seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.nvfp4.quantize_nvfp4`."""
    return nvfp4.quantize_nvfp4(x, signs=signs, seed=seed)


@torch.library.custom_op("precisionlint::dequantize", mutates_args=())
def dequantize(codes: Tensor, scales: Tensor, block: Sequence[int], out_dtype: torch.dtype = torch.float32) -> Tensor:
    """`kernels.quantize.dequantize`."""
    return quantize.dequantize(codes, scales, block=(block[0], block[1]), out_dtype=out_dtype)


@torch.library.custom_op("precisionlint::gemm_blockscaled", mutates_args=())
def gemm_blockscaled(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`kernels.gemm.gemm_blockscaled`."""
    return gemm.gemm_blockscaled(a, a_scales, b, b_scales, out_dtype=out_dtype)


@torch.library.custom_op("precisionlint::gemm_tensor", mutates_args=())
def gemm_tensor(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`kernels.gemm.gemm_tensor`."""
    return gemm.gemm_tensor(a, a_scale, b, b_scale, out_dtype=out_dtype)


@torch.library.custom_op("precisionlint::gemm_mx", mutates_args=())
def gemm_mx(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`kernels.mx.gemm_mx`."""
    return mx.gemm_mx(a, a_scales, b, b_scales, out_dtype=out_dtype)


@torch.library.custom_op("precisionlint::blockscaled_linear", mutates_args=())
def blockscaled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in FP8, (tokens, out) in x's dtype: x by 1x128, weight by 128x128, sums in fp32.

    x (tokens, in) and weight (out, in) are fp32, fp16 or bf16, of one dtype. The gradients are products in FP8 as well:
    that of x from grad by 1x128 along out, that of weight from grad by 1x128 along tokens and x by 128x128, each in the
    dtype of what it belongs to. Under autocast both inputs are cast to its dtype. Raises TypeError for two dtypes.
    """
    if x.dtype != weight.dtype:
        raise TypeError(f"x and weight are of one dtype, not {x.dtype} and {weight.dtype}")
    return _product(x, weight)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T, both quantised: (M, K) by 1x128 and (N, K) by 128x128, in a's dtype."""
    left, left_scales = quantize.quantize_1x128(a)
    right, right_scales = quantize.quantize_128x128(b)
    return gemm.gemm_blockscaled(left, left_scales, right, right_scales, out_dtype=a.dtype)


@torch.library.custom_op("precisionlint::_blockscaled_linear_backward", mutates_args=())
def _blockscaled_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _product(grad, weight.t()), _product(grad.t(), x.t())


def _register() -> None:
    def codes(x: Tensor, dtype: torch.dtype, *scales: int) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape, dtype=dtype), x.new_empty(scales, dtype=torch.float32)

    def product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)

    cast.register_fake(lambda x, dtype: x.new_empty(x.shape, dtype=dtype))
    stochastic_cast.register_fake(lambda x, seed, dtype=torch.bfloat16: x.new_empty(x.shape, dtype=dtype))
    quantize_tensor.register_fake(lambda x, dtype=FP8, power_of_two=False: codes(x, dtype))
    quantize_row.register_fake(lambda x, dtype=FP8, power_of_two=False: codes(x, dtype, x.shape[0], 1))
    quantize_1x128.register_fake(
        lambda x, dtype=FP8, power_of_two=False: codes(x, dtype, x.shape[0], _blocks(x.shape[1], 128))
    )
    quantize_128x128.register_fake(
        lambda x, dtype=FP8, power_of_two=False: codes(x, dtype, _blocks(x.shape[0], 128), _blocks(x.shape[1], 128))
    )
    quantize_mx.register_fake(
        lambda x, dtype=FP8, rounding="floor": (
            x.new_empty(x.shape, dtype=dtype),
            x.new_empty((x.shape[0], _blocks(x.shape[1], 32)), dtype=torch.uint8),
        )
    )
    quantize_nvfp4.register_fake(
        lambda x, signs=None, seed=None: (
            x.new_empty((x.shape[0], _blocks(x.shape[1], 2)), dtype=torch.uint8),
            x.new_empty((x.shape[0], _blocks(x.shape[1], 16)), dtype=FP8),
            x.new_empty((), dtype=torch.float32),
        )
    )
    dequantize.register_fake(
        lambda codes, scales, block, out_dtype=torch.float32: codes.new_empty(codes.shape, dtype=out_dtype)
    )
    for op in (gemm_blockscaled, gemm_tensor, gemm_mx):
        op.register_fake(
            lambda a, a_scales, b, b_scales, out_dtype=torch.bfloat16: product(a, a_scales, b, b_scales, out_dtype)
        )
    blockscaled_linear.register_fake(lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])))
    _blockscaled_linear_backward.register_fake(
        lambda grad, x, weight: (grad.new_empty(x.shape), grad.new_empty(weight.shape))
    )
    _register_gradients()
    _register_autocast()


def _register_gradients() -> None:
    def keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    cast.register_autograd(lambda ctx, grad: (grad.to(ctx.dtype), None), setup_context=keep_dtype)

    def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradients: tuple[Tensor, Tensor] = _blockscaled_linear_backward(grad, x, weight)
        return gradients

    blockscaled_linear.register_autograd(backward, setup_context=keep_operands)


def _register_autocast() -> None:
    for device in DEVICES:
        blockscaled_linear.register_autocast(device.lower(), torch.bfloat16)
        for op in (quantize_tensor, quantize_row, quantize_1x128, quantize_128x128, quantize_mx, quantize_nvfp4):
            _takes_what_it_is_given(op, device)
        for op in (cast, stochastic_cast, dequantize, gemm_blockscaled, gemm_tensor, gemm_mx):
            _takes_what_it_is_given(op, device)
        _takes_what_it_is_given(_blockscaled_linear_backward, device)


_LIBRARY: Any = torch.library.Library("precisionlint", "FRAGMENT")  # type: ignore[no-untyped-call]


def _takes_what_it_is_given(op: Any, device: str) -> None:
    """An autocast rule that casts nothing: `register_autocast` would widen FP8 operands."""
    key = f"Autocast{device}"
    overload: Callable[..., Any] = getattr(torch.ops.precisionlint, op._name).default
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args, **kwargs)

    _LIBRARY.impl(op._name, below, key)


_register()
