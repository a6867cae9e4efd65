"""Loops that are known to run once: nothing in them meets what a turn before left."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

TRAIN = """
import torch

rounds = 1


def train(model, critic, optimizer, other, loader, args):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        for turn in range({count}):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = critic(model(x)).mean()
            other.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(other)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        {update}
"""


def told(folder: Path, count: str, update: str = "scaler.update()") -> list[int]:
    (folder / "train.py").write_text(TRAIN.format(count=count, update=update), encoding="utf-8")
    report = check([str(folder / "train.py")], select=["missing-scaler-update"])
    assert not report.errors
    return [each.place.line for each in report.findings]


@pytest.mark.parametrize("count", ["1", "rounds", "2, 3", "0, 5, 5"])
def test_a_range_of_one_number_is_gone_through_once(tmp_path: Path, count: str) -> None:
    assert told(tmp_path, count) == []
    assert told(tmp_path, count, "pass") == [15, 20]


@pytest.mark.parametrize("count", ["2", "args.rounds", "rounds + args.more", "0, 5, 0", "1 << 70"])
def test_any_other_range_comes_round(tmp_path: Path, count: str) -> None:
    assert told(tmp_path, count) == [15]
