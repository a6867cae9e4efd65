"""Two ways to compute one thing in half, held to each other closer than their dtype's steps: possible, and nothing where they are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

HEAD = """from functools import partial

import pytest
import torch
from kernels import Blocked, Plain, blend, blend_kernel, gate, make_rows, route, route_ref, slow_route, swap_rows, swap_rows_kernel


"""

BROKEN = {
    "a compiled function and the eager one": """
def torch_scaled(x, a):
    return x * a + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype):
    x, a = torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    expected = torch_scaled(x, a)
    compiled = torch.compile(torch_scaled)
    torch.testing.assert_close(compiled(x, a), expected, atol=1e-3, rtol=1e-3)  # <-
""",
    "a kernel and its reference": """
def test_route():
    x = torch.randn(4, 64).bfloat16()
    assert torch.allclose(route(x), route_ref(x), rtol=1e-4, atol=1e-4)  # <-
""",
    "tensors that one comprehension makes": """
def test_route_of_three():
    x, y, z = (torch.randn(4, 64, dtype=torch.bfloat16) for _ in range(3))
    assert torch.allclose(route(x, y, z), route_ref(x, y, z), rtol=1e-4, atol=1e-4)  # <-
""",
    "a result that is called expected, in a dtype that has a name": """
def test_blend():
    dtype = torch.bfloat16
    buffer = torch.randn(4096, dtype=dtype)
    rows = torch.as_strided(buffer, (8, 64), (512, 1))
    expected = gate(rows.contiguous())
    torch.testing.assert_close(blend(rows), expected, rtol=1e-3, atol=1e-3)  # <-
""",
    "two modules that were made in two ways": """
def test_modules(width):
    plain, blocked = Plain(width), Blocked(width, size=16)
    blocked.load_state_dict(plain.state_dict())
    left, right = torch.randn(8, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    x = torch.cat((left, right), dim=1)
    original = plain(x)
    output = blocked(x)
    torch.testing.assert_close(output, original, rtol=1e-3, atol=1e-3)  # <-
""",
    "what a helper makes in the dtype it is asked for": """
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(dtype):
    keys, values = make_rows(8, 64, dtype=dtype)
    reference = gate(keys, values)
    assert (blend(keys, values) - route_ref(keys, values)).abs().max() < 1e-5  # <-
    torch.testing.assert_close(blend(keys, values), reference, rtol=1e-4, atol=1e-4)  # <-
""",
    "tensors that a number of the test's scales, held to the slow way": """
@pytest.mark.parametrize("weight", [10, 0.5, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled(dtype, weight):
    atol = 1e-3
    x = weight * torch.ones(4, 64, dtype=dtype)
    torch.testing.assert_close(route(x), slow_route(x), rtol=0.0, atol=atol)  # <-
""",
    "gradients, of which one is called the reference's": """
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients(dtype):
    start = torch.randn(4, 64, dtype=dtype)
    x, x_ref = start.clone().requires_grad_(), start.clone().requires_grad_()
    route(x).sum().backward()
    route_ref(x_ref).sum().backward()
    assert len(route(x).grad_fn.saved_tensors) == 1
    torch.testing.assert_close(x.grad, x_ref.grad, rtol=1e-5, atol=1e-5)  # <-
""",
    "what a test hands to the function that compares, at once and for each process": """
def compare(width, weights_dtype, inputs_dtype):
    plain, blocked = Plain(width).to(weights_dtype), Blocked(width, size=16).to(weights_dtype)
    x = torch.randn(8, 64, dtype=inputs_dtype)
    original = plain(x)
    assert torch.allclose(blocked(x), original, atol=1e-3)  # <-


def launch(weights_dtype, **others):
    start_processes(partial(compare, 64, weights_dtype=weights_dtype, **others), 2)


def check_rows(dtype):
    x = torch.randn(4, 64, dtype=dtype)
    torch.testing.assert_close(route(x), route_ref(x), rtol=1e-4, atol=1e-4)  # <-


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows(kind):
    check_rows(kind)


def test_two_processes():
    compare(64, torch.bfloat16, inputs_dtype=torch.bfloat16)


def check_columns(dtype):
    x = torch.randn(4, 64, dtype=dtype)
    torch.testing.assert_close(route(x), route_ref(x), rtol=1e-4, atol=1e-4)  # <-


def check_twice(dtype):
    check_columns(dtype)


def test_columns():
    check_twice(torch.bfloat16)
""",
}

LIKELY = {
    "a kernel that fills what is handed to it": """
def test_filled():
    a = torch.randn(64, 256, dtype=torch.bfloat16)
    b = torch.randn(128, 256, dtype=torch.bfloat16)
    out = torch.empty(64, 128, dtype=torch.bfloat16)
    blend_kernel[(4, 4)](a, b, out, 64, 128, 256)
    torch.testing.assert_close(out, a @ b.T, rtol=1e-5, atol=1e-5)  # <-
""",
    "an op that fills its first argument, and a bound that a test case sets": """
class TestBlend(BlendCase):
    def test_filled(self):
        dtype = torch.float16
        a, b = torch.randn(64, 256, dtype=dtype), torch.randn(128, 256, dtype=dtype)
        out = torch.empty_like(a)
        blend(out, a, b)
        self.assertLess((out - a @ b.T).abs().max().item(), 1e-6)  # <-
""",
}

SOUND = {
    "tolerances that bf16 can hold, and none": """
def test_route():
    x = torch.randn(4, 64).bfloat16()
    assert torch.allclose(route(x), route_ref(x), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(route(x), route_ref(x), rtol=0, atol=0)
""",
    "one function twice, and two that no name tells apart": """
def test_gates():
    x = torch.randn(4, 64).bfloat16()
    assert torch.allclose(gate(x), gate(x.clone()), atol=1e-5)
    assert torch.allclose(gate(x), route(x), atol=1e-5)
""",
    "numbers that are only moved, whatever they are called": """
def test_moved(index):
    dtype = torch.bfloat16
    rows = torch.randn(8, 64, dtype=dtype)
    out = torch.empty_like(rows)
    swap_rows_kernel[(8,)](rows, out, index)
    expected = torch.gather(rows, 0, index)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    expected_rows = route(rows)
    torch.testing.assert_close(swap_rows(rows), expected_rows, rtol=1e-5, atol=1e-5)
    expected_rows = torch.where(rows.abs() > 1, rows, 0.0)
    torch.testing.assert_close(blend(expected_rows), expected_rows, rtol=1e-5, atol=1e-5)
""",
    "one module, and what wraps it; two of one class": """
def test_wrapped(width):
    plain = Plain(width)
    wrapped = Blocked(plain, size=16).to(torch.bfloat16)
    again = Plain(width)
    x = torch.randn(8, 64).bfloat16()
    expected = plain(x)
    torch.testing.assert_close(wrapped(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.down(plain.up(x)), expected, rtol=1e-5, atol=1e-5)
""",
    "whole numbers, whose products bf16 holds": """
def test_whole():
    a, b = torch.randint(-4, 4, (8, 8)).to(torch.bfloat16), torch.randint(-4, 4, (8, 8)).to(torch.bfloat16)
    out = torch.empty(8, 8, dtype=torch.bfloat16)
    blend_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=1e-3, atol=1e-3)
""",
    "a tolerance for the dtype that has a name, and memory that stays as it was": """
def test_named(tolerances):
    dtype = torch.bfloat16
    x = torch.randn(8, 64, dtype=dtype)
    out, expected = torch.empty_like(x), gate(x)
    print(out, x)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(blend(x), expected, rtol=tolerance, atol=tolerance)
""",
    "gradients of which none is called a reference's, or that are held to what they can hold": """
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients(dtype):
    start = torch.randn(4, 64, dtype=dtype)
    x, y, x_ref = start.clone().requires_grad_(), start.clone().requires_grad_(), start.clone().requires_grad_()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, x_ref.grad, rtol=1e-2, atol=1e-2)
""",
    "a function that compares, which is handed fp32 alone, or a bound with its dtype": """
def check_rows(dtype, atol):
    x = torch.randn(4, 64, dtype=dtype)
    torch.testing.assert_close(route(x), route_ref(x), rtol=0, atol=atol)


def check_more(dtype):
    x = torch.randn(4, 64, dtype=dtype)
    torch.testing.assert_close(route(x), route_ref(x), rtol=1e-5, atol=1e-5)


def test_rows():
    check_rows(torch.float32, 1e-5)
    check_rows(torch.bfloat16, 5e-2)
    check_more(torch.float32)
""",
    "tensors that are scaled by something that may be fp32": """
@pytest.mark.parametrize("weight", [torch.ones(4, 1), 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled(dtype, weight):
    x = weight * torch.ones(4, 64, dtype=dtype)
    torch.testing.assert_close(route(x), slow_route(x), rtol=0.0, atol=1e-3)
""",
    "a model that was saved, and the same again": """
def test_saved(tmp_path, ref_model, model):
    x = torch.randn(4, 64).bfloat16()
    torch.save(ref_model.state_dict(), tmp_path / "weights")
    model.load_state_dict(torch.load(tmp_path / "weights"))
    torch.testing.assert_close(model(x), ref_model(x), rtol=1e-5, atol=1e-5)
""",
}


@pytest.mark.parametrize("name", [*BROKEN, *LIKELY, *SOUND])
def test_what_two_ways_in_half_are_held_to(tmp_path: Path, name: str) -> None:
    text = HEAD + {**BROKEN, **LIKELY, **SOUND}[name].lstrip("\n")
    file = tmp_path / "test_kernels.py"
    file.write_text(text)
    report = check([file.as_posix()], select=["tight-half-tolerance"], min_confidence="possible")
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("  # <-")]
    confidence = "likely" if name in LIKELY else "possible"
    assert [(each.place.line, each.confidence) for each in report.findings] == [(line, confidence) for line in marked]
