"""Compiled code tells what a dot accumulates into, and where; what cannot be told is 'unknown'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from precisionlint.kernels import ttir  # noqa: E402
from precisionlint.kernels.compiled import Launch, compile_for, launches  # noqa: E402
from precisionlint.kernels.outcome import Compiled  # noqa: E402
from precisionlint.kernels.quantize import quantize_1x128  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


@triton.jit
def product(a, b, c, K, WAY: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, 64)
    total = tl.zeros([64, 64], DTYPE)
    for step in range(0, K, 64):
        x = tl.load(a + i[:, None] * K + (step + i)[None, :])
        y = tl.load(b + (step + i)[:, None] + i[None, :] * K)
        if WAY == "carried":
            total = tl.dot(x, y, total, out_dtype=DTYPE)  # carried
        elif WAY == "bounded":
            total = tl.dot(x, y, total, max_num_imprecise_acc=32)
        elif WAY == "added":
            total += tl.dot(x, y).to(DTYPE)  # added
        elif WAY == "exact":
            total = tl.dot(x, y, total, input_precision="ieee")
        elif WAY == "swapped":
            total = tl.dot(x, y, total.trans())
    tl.store(c + i[:, None] * 64 + i[None, :], total)


@triton.jit
def total_of(x, y):
    i = tl.arange(0, 256)
    tl.store(y, tl.sum(tl.load(x + i), 0))  # reduced


@triton.jit
def total_of_wide(x, y):
    i = tl.arange(0, 256)
    tl.store(y, tl.sum(tl.load(x + i).to(tl.float32), 0))


@triton.autotune([triton.Config({"N": 64}), triton.Config({"N": 128}, num_warps=8)], key=[])
@triton.jit
def tuned(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 0.0)


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def launch_of(way: str, operands: torch.dtype, accumulator: Any = tl.float32) -> Launch:
    def launch() -> None:
        a, b = torch.zeros(64, 256, dtype=operands), torch.zeros(64, 256, dtype=operands)
        product[(1,)](a, b, torch.zeros(64, 64), 256, WAY=way, DTYPE=accumulator, num_warps=4)

    (caught,) = launches(launch, ())
    return caught


def only_launch(launch: Callable[[], Any]) -> Launch:
    (caught,) = launches(launch, ())
    return caught


def found(built: Compiled) -> list[tuple[str, int]]:
    assert not built.failed
    return [(each.rule, each.line) for each in built.evidence]


@pytest.mark.parametrize(
    ("way", "operands", "target", "promotion"),
    [
        ("carried", FP8, "sm_90", "never"),
        ("bounded", FP8, "sm_90", "every 32 of K"),
        ("bounded", FP8, "sm_100", "left to the tensor core"),
        ("added", FP8, "sm_90", "every 64 of K"),
        ("added", FP8, "sm_100", "left to the tensor core"),  # the compiler folds the addition into the dot
        ("carried", torch.bfloat16, "sm_90", "left to the tensor core"),
        ("carried", FP8, "gfx950", "left to the tensor core"),
        ("swapped", FP8, "sm_90", "unknown"),
    ],
)
def test_when_a_sum_is_promoted_is_read_from_the_code(
    way: str, operands: torch.dtype, target: str, promotion: str
) -> None:
    built = compile_for(launch_of(way, operands), target)
    assert [each.promotion for each in built.products] == [promotion]
    assert [each.result for each in built.products] == ["f32"]


def test_fp8_sums_that_stay_in_hoppers_tensor_core_are_an_error_there_alone() -> None:
    launch = launch_of("carried", FP8)
    assert found(compile_for(launch, "sm_90")) == [("triton-imprecise-fp8-dot", line_of("carried"))]
    assert found(compile_for(launch, "sm_100")) == []
    assert found(compile_for(launch_of("carried", torch.bfloat16), "sm_90")) == []


def test_half_accumulators_are_errors_whether_the_dot_or_an_addition_makes_them() -> None:
    dot = found(compile_for(launch_of("carried", torch.float16, tl.float16), "sm_90"))
    assert dot == [("triton-half-accumulator", line_of("carried"))]
    addition = found(compile_for(launch_of("added", torch.bfloat16, tl.bfloat16), "sm_90"))
    assert addition == [("triton-half-accumulator", line_of("added"))]


def test_fp32_operands_in_tf32_are_told_and_in_ieee_are_not() -> None:
    default = compile_for(launch_of("carried", torch.float32), "sm_90")
    assert found(default) == [("triton-default-tf32", line_of("carried"))]
    assert {each.severity for each in default.evidence} == {"info"}
    assert found(compile_for(launch_of("exact", torch.float32), "sm_90")) == []


def test_sums_over_half_loads_are_told_at_the_users_line_and_upcast_ones_are_not() -> None:
    half = torch.zeros(256, dtype=torch.float16)
    narrow = only_launch(lambda: total_of[(1,)](half, torch.zeros(1)))
    assert found(compile_for(narrow, "sm_90")) == [("triton-half-reduction", line_of("reduced"))]
    wide = only_launch(lambda: total_of_wide[(1,)](half, torch.zeros(1)))
    assert found(compile_for(wide, "sm_90")) == []


def test_registers_spills_shared_memory_and_divisions_are_reported() -> None:
    launch = only_launch(lambda: quantize_1x128(torch.zeros(16, 256)))
    built = compile_for(launch, "sm_90")
    assert built.registers is not None and 16 <= built.registers <= 255
    assert built.spills == 0
    assert built.shared is not None
    assert [name for name, _ in built.divisions] == ["div.rn.f32"]


def test_each_configuration_of_an_autotuned_kernel_is_caught() -> None:
    caught = launches(lambda: tuned[(1,)](torch.zeros(128)), ())
    assert [(each.arguments["N"], each.options.get("num_warps")) for each in caught] == [(64, 4), (128, 8)]


def test_a_kernel_that_does_not_compile_is_told_not_raised() -> None:
    launch = launch_of("carried", FP8)
    broken = replace(launch, arguments={**launch.arguments, "WAY": "added", "DTYPE": "no dtype"})
    built = compile_for(broken, "sm_90")
    assert built.failed
    assert built.products == ()


def test_what_a_launcher_makes_of_unwritten_outputs_does_not_count() -> None:
    def launch() -> None:
        x = torch.zeros(128)
        tuned[(1,)](x)
        raise ValueError("the kernel wrote nothing")

    assert len(launches(launch, ())) == 2


def test_launching_is_restored_after_a_launcher_that_raises() -> None:
    before = triton.JITFunction.run

    def fails() -> None:
        raise ValueError("no GPU here")

    with pytest.raises(ValueError, match="no GPU here"):
        launches(fails, ())
    assert triton.JITFunction.run is before


def test_text_that_is_not_as_expected_is_unknown_not_fine() -> None:
    (dot,) = ttir.dots("    %r = tt.dot %a, %b, %elsewhere : tensor<*xf8E4M3FN> -> tensor<16x16xf32> loc(#loc9)")
    assert (dot.a, dot.inner, dot.carried, dot.spot) == ("unknown", 0, None, ttir.Spot("", 0))
