"""Published figures of what scaling by tensor and by 1x128 costs come out of the bundled kernels."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from precisionlint.kernels.interpreter import load_interpreter, repaired

interpreter = load_interpreter()

from precisionlint.kernels.quantize import dequantize, quantize_1x128, quantize_tensor

with repaired(interpreter):
    torch.manual_seed(0)
    for outlier in (1e2, 1e4, 3e4):
        x = torch.randn(256, 1024)
        x[:, :4] *= outlier
        codes, scale = quantize_tensor(x)
        whole = dequantize(codes, scale.reshape(1, 1), block=(256, 1024))
        codes, scales = quantize_1x128(x)
        blocks = dequantize(codes, scales, block=(1, 128))
        errors = [((back - x)[:, 128:].norm() / x[:, 128:].norm()).item() for back in (whole, blocks)]
        print(*(f"{100 * error:.1f}" for error in errors))
"""


def test_outlier_channels_spoil_a_tensors_scale_and_leave_blocks_alone() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["2.6 2.6", "4.9 2.6", "14.1 2.6"], ran.stderr
