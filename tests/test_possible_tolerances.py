"""Two ways to compute one thing in half, held to each other closer than their dtype's steps: possible, and nothing where they are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

HEAD = "import pytest\nimport torch\nfrom kernels import gate, route, route_ref\n\n\n"

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
    "a model that was saved, and the same again": """
def test_saved(tmp_path, ref_model, model):
    x = torch.randn(4, 64).bfloat16()
    torch.save(ref_model.state_dict(), tmp_path / "weights")
    model.load_state_dict(torch.load(tmp_path / "weights"))
    torch.testing.assert_close(model(x), ref_model(x), rtol=1e-5, atol=1e-5)
""",
}


@pytest.mark.parametrize("name", [*BROKEN, *SOUND])
def test_what_two_ways_in_half_are_held_to(tmp_path: Path, name: str) -> None:
    text = HEAD + {**BROKEN, **SOUND}[name].lstrip("\n")
    file = tmp_path / "test_kernels.py"
    file.write_text(text)
    report = check([file.as_posix()], select=["tight-half-tolerance"], min_confidence="possible")
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("  # <-")]
    assert [(each.place.line, each.confidence) for each in report.findings] == [(line, "possible") for line in marked]
