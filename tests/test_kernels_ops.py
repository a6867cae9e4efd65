"""The bundled kernels as torch ops: registered as torch asks for it, usable in training, and no finding of our own rules."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from precisionlint import check

pytest.importorskip("triton")

PRELUDE = """
import torch
from precisionlint.kernels import ops
from precisionlint.kernels.interpreter import load_interpreter, repaired
torch.manual_seed(0)
x, w = torch.randn(20, 160), torch.randn(130, 160)
with repaired(load_interpreter()):
"""


def interpreted(folder: Path, program: str) -> str:
    """What a program prints in a process whose triton interprets, with x (20, 160) and w (130, 160) at hand."""
    script = folder / "program.py"
    script.write_text(PRELUDE + textwrap.indent(textwrap.dedent(program), "    "), encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_torch_finds_nothing_wrong_with_how_the_ops_are_registered(tmp_path: Path) -> None:
    printed = interpreted(
        tmp_path,
        """
        one = torch.tensor(1)
        given = {
            ops.cast: (x, torch.float8_e5m2), ops.stochastic_cast: (x, one), ops.quantize_tensor: (x,),
            ops.quantize_row: (x,), ops.quantize_1x128: (x,), ops.quantize_128x128: (x,), ops.quantize_mx: (x,),
            ops.quantize_nvfp4: (x, torch.ones(16), one),
        }
        a, s, b, t = *ops.quantize_1x128(x), *ops.quantize_128x128(w)
        # torch's check of schemas compares inputs by a product, which it does not have for FP8
        products = {ops.gemm_blockscaled: (a, s, b, t), ops.dequantize: (a, s, [1, 128])}
        whole = (*ops.quantize_tensor(x), *ops.quantize_tensor(w))
        products |= {ops.gemm_tensor: whole, ops.gemm_mx: (*ops.quantize_mx(x), *ops.quantize_mx(w))}
        wanted = ("test_faketensor", "test_autograd_registration")
        for op, args in (given | products).items():
            torch.library.opcheck(op, args, test_utils=wanted if op in products else ("test_schema", *wanted))
        torch.library.opcheck(ops.blockscaled_linear, (x.requires_grad_(), w.requires_grad_()))
        print(len(given | products))
        """,
    )
    assert printed == "12\n"


def test_a_layer_made_of_them_trains_within_the_error_of_fp8(tmp_path: Path) -> None:
    printed = interpreted(
        tmp_path,
        """
        x.requires_grad_(), w.requires_grad_()
        y = ops.blockscaled_linear(x, w)
        grad = torch.randn_like(y)
        y.backward(grad)
        found = (y.detach(), x @ w.t()), (x.grad, grad @ w), (w.grad, grad.t() @ x)
        for ours, exact in found:
            print(((ours - exact).norm() / exact.norm()).item())
        """,
    )
    # A quantised number is off by 2^-4 at most, two of them by 2^-3, and the errors of K products do not add up.
    assert all(float(line) < 2**-4 for line in printed.splitlines())
    assert len(printed.splitlines()) == 3


def test_under_autocast_the_layer_takes_its_dtype_and_quantisers_what_they_are_given(tmp_path: Path) -> None:
    printed = interpreted(
        tmp_path,
        """
        with torch.autocast("cpu", dtype=torch.bfloat16):
            print(ops.blockscaled_linear(x, w.bfloat16()).dtype)
            codes, scales = ops.quantize_1x128(x)
            print(torch.equal(scales, ops.quantize_1x128(x)[1]), codes.dtype)
            print(ops.gemm_blockscaled(codes, scales, *ops.quantize_128x128(w)).dtype)
        plain = ops.quantize_1x128(x)
        print(torch.equal(codes.float(), plain[0].float()), torch.equal(scales, plain[1]))
        """,
    )
    assert printed.split() == ["torch.bfloat16", "True", "torch.float8_e4m3fn", "torch.bfloat16", "True", "True"]


def test_a_compiled_function_holds_them_in_one_graph(tmp_path: Path) -> None:
    printed = interpreted(
        tmp_path,
        """
        compiled = torch.compile(lambda x, w: ops.blockscaled_linear(x, w).sum(), backend="aot_eager", fullgraph=True)
        print(torch.equal(compiled(x, w), ops.blockscaled_linear(x, w).sum()))
        """,
    )
    assert printed == "True\n"


PROGRAM = """
import torch
from precisionlint.kernels import ops


class Linear(torch.nn.Linear):
    def forward(self, x):
        return ops.blockscaled_linear(x, self.weight)


def train(loader, device="cpu"):
    model = Linear(160, 130, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in loader:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_neither_check_nor_the_audit_finds_fault_with_a_step_that_uses_them(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    assert check([str(path)], isolated=True).findings == ()
    printed = interpreted(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import precisionlint
        import train
        with precisionlint.audit() as audit:
            train.train([x])
        print([finding.rule for finding in audit.report.findings])
        """,
    )
    assert printed == "[]\n"
