"""Under which configuration a fault stands, as a finding names it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

PROGRAM = """
import torch

{dtype}


def train(model, loader, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype={region}):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    train(build(), data(), None)
"""
SUPPORTED = "torch.cuda.is_available() and torch.cuda.is_bf16_supported()"


def conditions(tmp_path: Path, rule: str, **parts: str) -> list[str]:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(PROGRAM.format(**parts)), encoding="utf-8")
    return [each.when for each in check([str(file)], select=[rule], assume={}).findings]


@pytest.mark.parametrize(
    ("dtype", "enabled", "named"),
    [
        (f"dtype = 'bfloat16' if {SUPPORTED} else 'float16'", "dtype == 'float16'", "dtype == 'float16'"),
        (f"dtype = torch.bfloat16 if {SUPPORTED} else torch.float16", "dtype == torch.float16", "dtype == torch.float16"),
        (f"if {SUPPORTED}:\n    dtype = 'bfloat16'\nelse:\n    dtype = 'float16'", "dtype == 'float16'", "dtype == 'float16'"),
        ("dtype = 'float16'", "dtype == 'float16'", ""),  # nothing chose it
    ],
)  # fmt: skip
def test_a_dtype_that_an_expression_chose_is_a_condition(tmp_path: Path, dtype: str, enabled: str, named: str):
    region = "torch.float16 if dtype in ('float16', torch.float16) else torch.bfloat16"
    assert conditions(tmp_path, "clip-before-unscale", dtype=dtype, enabled=enabled, region=region) == [named]


def test_a_region_of_bf16_says_what_chose_it(tmp_path: Path):
    dtype = "import os\nHALF = torch.bfloat16 if os.environ.get('BF16') else torch.float16"
    assert conditions(tmp_path, "scaler-with-bf16", dtype=dtype, enabled="True", region="HALF") == [
        "HALF == torch.bfloat16"
    ]
