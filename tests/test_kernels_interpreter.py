"""The interpreter, repaired, converts as a GPU does, guards memory, and refuses what it would compute wrongly."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from precisionlint.formats import E4M3FN, E5M2, decode
from precisionlint.kernels.interpreter import RefusedError, convert

pytest.importorskip("triton")

PRELUDE = """
import torch, triton, triton.language as tl
from precisionlint.kernels.interpreter import load_interpreter, repaired
"""


def interpreted(folder: Path, program: str, interpret: bool = True) -> str:
    """What a program prints in a process whose triton interprets; a kernel's source must lie in a file."""
    script = folder / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(program), encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def all_bf16_as_fp32() -> torch.Tensor:
    return torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float()


@pytest.mark.parametrize(("name", "dtype"), [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)])
def test_conversions_to_fp8_saturate_and_otherwise_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    target = {"fp8e4nv": E4M3FN, "fp8e5": E5M2}[name]
    values = all_bf16_as_fp32()
    ours = decode(torch.from_numpy(convert(values.numpy(), "fp32", name).astype(np.int64)), target)
    theirs = values.clamp(-target.maximum, target.maximum).to(dtype).double()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_conversions_between_halves_are_torchs() -> None:
    patterns = torch.arange(2**16).to(torch.uint16)
    bf16 = torch.from_numpy(convert(patterns.view(torch.float16).numpy(), "fp16", "bf16").view(np.int16))
    theirs = patterns.view(torch.float16).to(torch.bfloat16)
    assert torch.equal(bf16.view(torch.bfloat16).nan_to_num(), theirs.nan_to_num())
    fp16 = torch.from_numpy(convert(patterns.numpy(), "bf16", "fp16"))
    assert torch.equal(fp16.nan_to_num(), patterns.view(torch.bfloat16).to(torch.float16).nan_to_num())


def test_rounding_toward_zero_is_not_rounding_to_nearest() -> None:
    value = np.array([1.11, -1.11], dtype=np.float32)
    nearest, toward_zero = convert(value, "fp32", "fp8e4nv"), convert(value, "fp32", "fp8e4nv", toward_zero=True)
    assert (nearest - toward_zero).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["fp8e4b15", "fp8e4b8", "fp8e5b16"])
def test_a_type_whose_conversions_are_not_known_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=name):
        convert(np.zeros(1, np.uint8), name, "fp32")


CAST = """
@triton.jit
def kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))

def cast(x, dtype):
    y = torch.empty(x.shape, dtype=dtype)
    kernel[(1,)](x, y, x.numel())
    return y.float()

x = torch.tensor([464.0, 500.0, float("nan"), 0.00098, 1.1875, 1.0039062501, float("inf"), 0.0])
"""


def test_the_interpreter_as_it_comes_is_wrong_and_repaired_is_right(tmp_path: Path) -> None:
    program = f"""{CAST}
before = cast(x, torch.float8_e4m3fn)
with repaired(load_interpreter()):
    after = cast(x, torch.float8_e4m3fn)
restored = cast(x, torch.float8_e4m3fn)
print(after.tolist(), torch.equal(before.nan_to_num(-1), after.nan_to_num(-1)))
print(torch.equal(before.nan_to_num(-1), restored.nan_to_num(-1)))
"""
    right = "[448.0, 448.0, nan, 0.001953125, 1.25, 1.0, 448.0, 0.0]"
    assert interpreted(tmp_path, program) == f"{right} False\nTrue\n"


def test_a_repair_that_is_not_exact_is_refused(tmp_path: Path) -> None:
    program = """
    from precisionlint.kernels import interpreter
    exact = interpreter.round_to
    def careless(values, target, **how):
        return exact(values, target, **{**how, "mode": "toward-zero"})
    interpreter.round_to = careless
    try:
        with repaired(load_interpreter()):
            print("open")
    except interpreter.UnsupportedTritonError as error:
        print(error)
    """
    printed = interpreted(tmp_path, program)
    assert "still converts" in printed
    assert "open" not in printed


def test_a_triton_without_the_private_part_is_named(tmp_path: Path) -> None:
    program = """
    from triton.runtime import interpreter
    from precisionlint.kernels.interpreter import UnsupportedTritonError
    del interpreter._convert_float
    try:
        load_interpreter()
    except UnsupportedTritonError as error:
        print(error)
    """
    assert "has no _convert_float" in interpreted(tmp_path, program)


def test_a_dot_of_scaled_operands_is_their_product_in_every_version(tmp_path: Path) -> None:
    program = """
    from precisionlint.formats import E2M1, E4M3FN, E8M0FNU, decode
    interpreter = load_interpreter()

    @triton.jit
    def kernel(a, a_scales, b, b_scales, y, A_FORMAT: tl.constexpr, IN_BYTE: tl.constexpr):
        i, k, group = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 2)
        bytes = tl.arange(0, 64 // IN_BYTE)
        left = tl.load(a + i[:, None] * (64 // IN_BYTE) + bytes[None, :])
        right = tl.load(b + k[:, None] + i[None, :] * 64)
        left_scale = tl.load(a_scales + i[:, None] * 2 + group[None, :])
        right_scale = tl.load(b_scales + i[:, None] * 2 + group[None, :])
        product = tl.dot_scaled(left, left_scale, A_FORMAT, right, right_scale, "e4m3")
        tl.store(y + i[:, None] * 16 + i[None, :], product)

    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 120, (16, 64), generator=draw, dtype=torch.uint8) for _ in range(2))
    scales = [torch.randint(107, 148, (16, 2), generator=draw, dtype=torch.uint8) for _ in range(2)]
    scales[0][0] = 0  # 2^-127, which is no zero
    scales[0][1] = 255  # NaN, which is no infinity
    wide = [decode(each, E8M0FNU).repeat_interleave(32, 1) for each in scales]
    right = decode(b, E4M3FN) * wide[1]
    fours = a & 15
    packed = fours[:, ::2] | (fours[:, 1::2] << 4)
    with repaired(interpreter):
        for codes, left, name, in_byte in ((a, decode(a, E4M3FN), "e4m3", 1), (packed, decode(fours, E2M1), "e2m1", 2)):
            y, given = torch.empty(16, 16), codes if in_byte == 2 else codes.view(torch.float8_e4m3fn)
            kernel[(1,)](given, scales[0], b.view(torch.float8_e4m3fn), scales[1], y, A_FORMAT=name, IN_BYTE=in_byte)
            exact = (left * wide[0]) @ right.t()
            print(torch.allclose(y.double(), exact, rtol=1e-5, atol=0, equal_nan=True), bool(y[0].all()))
    """
    assert interpreted(tmp_path, program) == "True True\n" * 2


def test_bounds_drop_nan_unless_they_are_told_to_propagate_it_in_every_version(tmp_path: Path) -> None:
    program = """
    @triton.jit
    def kernel(x, y):
        nan = tl.load(x)
        tl.store(y, tl.minimum(nan, 1.0))
        tl.store(y + 1, tl.maximum(1.0, nan))
        tl.store(y + 2, tl.clamp(nan, -1.0, 1.0))
        tl.store(y + 3, tl.minimum(nan, 1.0, propagate_nan=tl.PropagateNan.ALL))
        tl.store(y + 4, tl.maximum(1.0, nan, propagate_nan=tl.PropagateNan.ALL))
        tl.store(y + 5, tl.clamp(nan, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))
        tl.store(y + 6, tl.clamp(5.0 + 0.0 * tl.load(y), -1.0, 1.0))
    y = torch.zeros(7)
    with repaired(load_interpreter()):
        kernel[(1,)](torch.full((1,), float("nan")), y)
    print(y.tolist())
    """
    assert interpreted(tmp_path, program) == "[1.0, 1.0, -1.0, nan, nan, nan, 1.0]\n"


def test_a_pair_of_versions_that_cannot_run_loops_is_named(tmp_path: Path) -> None:
    program = """
    import numpy
    from precisionlint.kernels.interpreter import UnsupportedTritonError
    for pair in (("3.6.0", "2.4.6"), ("3.6.0", "2.3.5"), ("3.7.1", "2.4.6"), ("3.10.0", "2.10.0")):
        triton.__version__, numpy.__version__ = pair
        try:
            load_interpreter()
            print("runs")
        except UnsupportedTritonError as error:
            print(error)
    """
    named, *others = interpreted(tmp_path, program).splitlines()
    assert "install numpy below 2.4" in named
    assert others == ["runs"] * 3


def test_a_process_that_compiles_cannot_interpret(tmp_path: Path) -> None:
    program = """
    from precisionlint.kernels.interpreter import UnsupportedTritonError
    try:
        load_interpreter()
    except UnsupportedTritonError as error:
        print(error)
    """
    assert "TRITON_INTERPRET=1" in interpreted(tmp_path, program, interpret=False)


def outcomes(folder: Path, bodies: list[str], preparation: str, argument: str) -> list[str]:
    """What becomes of kernels with such bodies, one line each: the innermost error, or 'ran'."""
    kernels = "".join(
        f"@triton.jit\ndef kernel{number}(x):\n    i = tl.arange(0, 16)\n{preparation}    {body}\n\n"
        for number, body in enumerate(bodies)
    )
    names = ", ".join(f"kernel{number}" for number in range(len(bodies)))
    program = f"""
with repaired(load_interpreter()):
    for kernel in ({names},):
        try:
            kernel[(1,)]({argument})
            print("ran")
        except Exception as error:
            while error.__cause__ is not None:
                error = error.__cause__
            print(type(error).__name__, error)
"""
    return interpreted(folder, kernels + program).splitlines()


def test_arithmetic_on_raw_bits_is_refused(tmp_path: Path) -> None:
    refused = {
        "a + a": "arithmetic of bf16",
        "a * a": "arithmetic of bf16",
        "-a": "arithmetic of bf16",
        "tl.reduce(a, 0, tl.standard._sum_combine)": "a reduction of bf16",
        "tl.dot(b, b)": "a dot of bf16",
    }
    preparation = "    a = tl.load(x + i)\n    b = tl.zeros([16, 16], tl.bfloat16)\n"
    found = outcomes(tmp_path, list(refused), preparation, "torch.ones(16, dtype=torch.bfloat16)")
    for line, expected in zip(found, refused.values(), strict=True):
        assert line.startswith(f"RefusedError {expected}")


def test_integers_become_bf16_numbers_not_bits(tmp_path: Path) -> None:
    program = """
    @triton.jit
    def kernel(x, y):
        i = tl.arange(0, 4)
        tl.store(y + i, tl.load(x + i).to(tl.bfloat16))
    y = torch.empty(4, dtype=torch.bfloat16)
    with repaired(load_interpreter()):
        kernel[(1,)](torch.tensor([0, 1, -3, 257]), y)
    print(y.tolist())
    """
    assert interpreted(tmp_path, program) == "[0.0, 1.0, -3.0, 256.0]\n"


def test_access_outside_of_the_tensors_is_seen_before_it_happens(tmp_path: Path) -> None:
    stray = {
        "tl.load(x + i + 1)": "reads 1 of 16",
        "tl.load(x + i - 1, i < 15)": "reads 1 of 15",
        "tl.store(x + i * 2, 0.0)": "writes 8 of 16",
        "tl.atomic_add(x + i + 1, 1.0)": "writes 1 of 16",
    }
    found = outcomes(tmp_path, list(stray), "", "torch.zeros(16)")
    for line, expected in zip(found, stray.values(), strict=True):
        assert line.startswith(f"OutOfBoundsError {expected} elements outside")


def test_masked_access_outside_is_allowed(tmp_path: Path) -> None:
    program = """
    @triton.jit
    def kernel(x, y):
        i = tl.arange(0, 16)
        tl.store(y + i, tl.load(x + i, i < 5), i < 5)
    y = torch.zeros(5)
    with repaired(load_interpreter()):
        kernel[(1,)](torch.arange(5.0), y)
    print(y.tolist())
    """
    assert interpreted(tmp_path, program) == "[0.0, 1.0, 2.0, 3.0, 4.0]\n"
