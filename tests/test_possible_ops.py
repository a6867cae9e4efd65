"""Ops of a program's own that may be handed half and fp32 together: possible where they are defined, and nothing where they see to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

FUNCTION = """
import torch
from {module} import scaled_add_fwd, scaled_add_bwd


class ScaledAdd(torch.autograd.Function):  # <-
    @staticmethod
    def forward(ctx, x, {second}, alpha):
        ctx.save_for_backward(x, {second})
        return scaled_add_fwd({handed}, alpha)

    @staticmethod
    def backward(ctx, grad):
        x, {second} = ctx.saved_tensors
        return *scaled_add_bwd(grad, x, {second}), None
"""

OP = """
import torch
import triton.language as tl
from engines import ENGINES, launch


@torch.library.custom_op("mine::{name}", mutates_args=())  # <-
def {name}(x: torch.Tensor, y: torch.Tensor, key: str) -> torch.Tensor:
    {body}


@{name}.register_fake
def _(x, y, key):
    return torch.empty_like(x)


{name}.register_autograd(ENGINES["backward"])
{registered}
"""
KEPT = """kept = torch.empty(x.shape, device=x.device, dtype=torch.float32)
    launch(x, kept)
    return kept.to(x.dtype)"""


def told(folder: Path, rule: str, text: str) -> bool:
    (folder / "ops.py").write_text(text, encoding="utf-8")
    found = check([str(folder / "ops.py")], select=[rule], min_confidence="possible").findings
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]
    assert [each.place.line for each in found] in ([], marked)
    assert {each.confidence for each in found} <= {"possible"}
    return bool(found)


@pytest.mark.parametrize(
    ("module", "second", "handed", "expected"),
    [
        ("sparse._triton", "source", "x, source", True),
        ("fused_cuda", "source", "x, source", True),
        ("layers.functional", "source", "x, source", False),
        ("sparse._triton", "index", "x, index", False),
        ("sparse._triton", "weight_scale", "x, weight_scale", False),
        ("sparse._triton", "source", "x.float(), source.float()", False),
    ],
)
def test_a_function_whose_kernels_are_imported(
    tmp_path: Path, module: str, second: str, handed: str, expected: bool
) -> None:
    text = FUNCTION.format(module=module, second=second, handed=handed)
    assert told(tmp_path, "function-without-custom-fwd", text) is expected


def test_a_function_whose_kernels_see_one_input_before_they_see_two(tmp_path: Path) -> None:
    text = FUNCTION.format(module="sparse._triton", second="source", handed="x, source")
    text = text.replace("return scaled_add_fwd", "size = scaled_add_bwd(x)\n        return scaled_add_fwd")
    assert told(tmp_path, "function-without-custom-fwd", text)


@pytest.mark.parametrize("cast", ["", ".to(torch.float32)"])
def test_a_function_whose_kernels_another_file_of_the_project_holds(tmp_path: Path, cast: str) -> None:
    (tmp_path / "kernels.py").write_text(
        f"def scaled_add_fwd(x, source, alpha):\n    return add_kernel[(4,)](x{cast}, source{cast}, alpha)\n"
        "def scaled_add_bwd(grad, x, source):\n    return back_kernel[(4,)](grad, x, source)\n"
    )
    text = FUNCTION.format(module="kernels", second="source", handed="x, source")
    assert told(tmp_path, "function-without-custom-fwd", text) is (not cast)


@pytest.mark.parametrize(
    ("name", "body", "registered", "expected"),
    [
        ("int4_matmul", "return ENGINES[key](x, y)", "", True),
        ("fused_attention", KEPT, "", True),
        ("shuffle", "return ENGINES[key](x, y)", "", False),
        ("int4_matmul", "return ENGINES[key](x.half(), y.half())", "", False),
        (
            "int4_matmul",
            "return ENGINES[key](x, y)",
            "torch.library.register_autocast('mine::m', 'cuda', torch.half)",
            False,
        ),
    ],
)
def test_an_op_that_is_called_a_product_or_gives_the_dtype_of_its_input(
    tmp_path: Path, name: str, body: str, registered: str, expected: bool
) -> None:
    text = OP.format(name=name, body=body, registered=registered)
    assert told(tmp_path, "unregistered-custom-op", text) is expected


BELOW = """
import torch
import torch.nn.functional as F


def filtered(x, taps):
    return F.conv1d(x{cast}, taps{cast})


def both(x, low, high):
    return torch.cat([filtered(x, low), filtered(x, high)], 1)


def spread(grad, taps):
    return {spread}


class Filters(torch.autograd.Function):  # <-
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(low, high)
        return both(x, low, high)

    @staticmethod
    def backward(ctx, grad):
        low, high = ctx.saved_tensors
        return {back}, None, None
"""


@pytest.mark.parametrize(
    ("cast", "spread", "back", "expected"),
    [
        ("", "F.conv_transpose1d(grad, taps)", "spread(grad, low)", True),
        ("", "F.conv_transpose1d(grad, taps)", "spread(grad, low) + spread(grad, high)", True),
        ("", "grad * taps.sum()", "spread(grad, low)", False),  # a half gradient times fp32 is fp32
        ("", "F.conv_transpose1d(grad, taps.to(grad.dtype))", "spread(grad, low)", False),
        ("", "F.conv_transpose1d(grad.float(), taps.float())", "spread(grad, low)", False),
        (".float()", "F.conv_transpose1d(grad, taps)", "spread(grad, low)", False),
        ("", "convert(grad, taps)", "spread(grad, low)", False),
    ],
)
def test_a_function_that_multiplies_in_functions_of_its_file(
    tmp_path: Path, cast: str, spread: str, back: str, expected: bool
) -> None:
    text = BELOW.format(cast=cast, spread=spread, back=back)
    assert told(tmp_path, "function-without-custom-fwd", text) is expected


def test_a_function_whose_products_are_static_methods_of_its_own(tmp_path: Path) -> None:
    text = """
import torch


class Mixed(torch.autograd.Function):  # <-
    @staticmethod
    def apart(x, maps):
        return torch.einsum("nd,kde->nke", x, maps)

    @staticmethod
    def joined(grad, maps):
        return torch.einsum("nke,kde->nd", grad, maps)

    @staticmethod
    def forward(ctx, x, maps):
        ctx.save_for_backward(maps)
        return Mixed.apart(x, maps)

    @staticmethod
    def backward(ctx, grad):
        (maps,) = ctx.saved_tensors
        return Mixed.joined(grad, maps), None
"""
    assert told(tmp_path, "function-without-custom-fwd", text)
    assert not told(
        tmp_path,
        "function-without-custom-fwd",
        text.replace("(grad, maps), None", "(grad.float(), maps.float()), None"),
    )


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        ("x.mul(x_s)", True),
        ("x_s * x", True),
        ("x.div(x_s)", True),
        ("x_s / x", False),
        ("x.mul(x_s).clamp(-448, 448)", False),
    ],
)
def test_a_product_with_what_a_caller_hands_in_is_scaled_by_it(tmp_path: Path, scaled: str, expected: bool) -> None:
    text = f"""
import torch


def codes(x, x_s: float):
    x = torch.relu(x)
    return ({scaled}).to(torch.float8_e4m3fn)  # <-
"""
    assert told(tmp_path, "fp8-cast-without-clamp", text) is expected


HALF_WAY = """
import torch
from torch.amp import custom_bwd, custom_fwd


class Mixed(torch.autograd.Function):  # <-
    @staticmethod
    @custom_fwd(device_type="cuda"{given})
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod{around}
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad
"""


@pytest.mark.parametrize(
    ("given", "around", "expected"),
    [
        ("", "", True),
        ("", '\n    @custom_bwd(device_type="cuda")', False),
        (", cast_inputs=torch.float32", "", False),
    ],
)
def test_a_function_whose_backward_alone_is_left_out(tmp_path: Path, given: str, around: str, expected: bool) -> None:
    text = HALF_WAY.format(given=given, around=around)
    assert told(tmp_path, "function-without-custom-fwd", text) is expected


HANDED_ON = """
import torch

OPTIONS = {options}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, one, other):
        ctx.save_for_backward(x, weight, one, other)
        return torch._scaled_mm(x, weight.t(), one, other, **OPTIONS)

    @staticmethod
    def backward(ctx, grad):
        x, weight, one, other = ctx.saved_tensors
        return torch._scaled_mm(grad, weight, one, other, **OPTIONS), None, None, None  # <-
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("dict(out_dtype=torch.bfloat16, use_fast_accum=True)", True),
        ('{"out_dtype": torch.bfloat16, "use_fast_accum": True}', True),
        ("dict(dict(use_fast_accum=True), use_fast_accum=False)", False),
        ("read()", False),
        ("[None, None, torch.bfloat16, True]", True),
        ("[None, None, torch.bfloat16, False]", False),
    ],
)
def test_what_a_dict_hands_on_is_handed(tmp_path: Path, options: str, expected: bool) -> None:
    text = HANDED_ON.format(options=options)
    if options.startswith("["):  # without names
        text = text.replace("**OPTIONS", options.strip("[]"))
    (tmp_path / "ops.py").write_text(text, encoding="utf-8")
    found = check([(tmp_path / "ops.py").as_posix()], select=["fp8-fast-accumulation-in-backward"]).findings
    assert bool(found) is expected
