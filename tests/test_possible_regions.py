"""Autocast regions that are written for one device: whether another is met, the callers decide, so that it is possible and no more."""

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

HEAD = """
from contextlib import nullcontext

import torch
from torch import nn
"""

MODULE = """
class Projector(nn.Module):
    def __init__(self, width, mixed=True):
        super().__init__()
        self.mixed = mixed
        self.up = nn.Linear(width, 4 * width)

    def forward(self, tokens):
        with {region}:
            return self.up(tokens)
"""

CLASS = """
class Captioner:
    def __init__(self, encoder, device):
        self.device = device
        self.encoder = encoder.to(self.device).eval()

    def features(self, pictures):
        with torch.no_grad(), {region}:
            return self.encoder(pictures.to(self.device))
"""

FUNCTION = """
@torch.no_grad()
def distances(model, left, right, device):
    a, b = left.to(device), right.to(device)
    with {region}:
        return torch.cdist(model(a.float()), model(b.float()))
"""

OLD = """
from torch.cuda.amp import autocast


class Captioner:
    def __init__(self, encoder, device):
        self.encoder, self._device = encoder.to(device), device

    def features(self, pictures):
        with autocast():
            return self.encoder(pictures.to(device=self._device))
"""


def told(folder: Path, text: str) -> list[tuple[str, str]]:
    """What is told of devices at all, and that a run by default tells nothing."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    rule = {"autocast-device-mismatch"}
    assert not check([str(path)], select=rule, isolated=True).findings
    shown = check([str(path)], select=rule, min_confidence="possible", isolated=True).findings
    return [(each.severity, each.confidence) for each in shown]


@pytest.mark.parametrize(
    ("program", "region"),
    [
        (MODULE, 'torch.autocast("cuda", dtype=torch.float16, enabled=self.mixed)'),
        (MODULE, 'torch.amp.autocast(device_type="cuda", enabled=False)'),
        (CLASS, 'torch.autocast("cuda")'),
        (FUNCTION, 'torch.autocast(device_type="cuda", enabled=False)'),
        (OLD, ""),
    ],
)
def test_cuda_written_out_where_tensors_go_elsewhere_is_possible(tmp_path: Path, program: str, region: str) -> None:
    assert told(tmp_path, HEAD + program.format(region=region)) == [("info", "possible")]


@pytest.mark.parametrize(
    ("program", "region", "more"),
    [
        (MODULE, "torch.autocast(tokens.device.type, dtype=torch.bfloat16)", ""),
        (MODULE, 'torch.autocast("cuda") if tokens.is_cuda else nullcontext()', ""),
        (MODULE, 'torch.autocast("cuda")', 'DEVICE = torch.device("cuda")'),
        (MODULE, 'torch.autocast("cuda")', "import triton"),
        (MODULE, 'torch.autocast("cpu", dtype=torch.bfloat16)', ""),
        (CLASS, 'torch.autocast("cuda")', "def train(loss):\n    loss.backward()"),
        (FUNCTION, 'torch.autocast("cuda", enabled=device.type == "cuda")', ""),
        (FUNCTION.replace("left.to(device)", "left.cuda()"), 'torch.autocast("cuda")', ""),
        (FUNCTION.replace(".to(device)", ""), 'torch.autocast("cuda")', ""),
    ],
)
def test_cuda_written_out_in_code_for_cuda_is_silent(tmp_path: Path, program: str, region: str, more: str) -> None:
    assert told(tmp_path, f"{HEAD}\n{more}\n{program.format(region=region)}") == []
