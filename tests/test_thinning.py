"""Of more paths than are followed, those of mixed precision go on: in a long program the branch for fp16 is one of many."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check
from precisionlint.source import reading

MODES = """
import torch
from torch import nn


def main(options):
    if options.mode == "plain":
        kind = torch.float32
    elif options.mode == "bf16":
        kind = torch.bfloat16
    elif options.mode == "bf16_buffers":
        kind = torch.bfloat16
    elif options.mode == "fp16":
        kind = torch.float16
    else:
        raise ValueError(options.mode)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda") if options.mode == "fp16" else None
    for batch in options.batches:
        with torch.autocast("cuda", dtype=kind, enabled=options.mode != "plain"):
            loss = net(batch).square().mean()
        if scaler is not None:
            scaler.scale(loss).backward()
            {unscale}
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()


main(parsed())
"""
METHOD = """
import torch
from torch import nn


class Learner:
    def learn(self, precision, batches):
        net = nn.Linear(8, 8)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = None
        if precision == "32":
            kind = torch.float32
        elif precision == "bf16-mixed":
            kind = torch.bfloat16
        elif precision == "bf16-true":
            kind = torch.bfloat16
        elif precision == "16-mixed":
            kind = torch.float16
            scaler = torch.amp.GradScaler("cuda")
        else:
            raise ValueError(precision)
        for batch in batches:
            sgd.zero_grad()
            with torch.autocast("cuda", dtype=kind):
                loss = net(batch).square().mean()
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                {unscale}
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if scaler is None:
                sgd.step()
            else:
                scaler.step(sgd)
                scaler.update()
"""


@pytest.mark.parametrize(
    ("program", "unscale"),
    [(MODES, "scaler.unscale_(optimizer)"), (METHOD, "scaler.unscale_(sgd)")],
    ids=["modes", "method"],
)
def test_two_paths_are_enough_for_the_branch_that_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, unscale: str
):
    monkeypatch.setattr(reading, "WIDEST", 2)  # as in a program that is too long for more
    broken, sound = tmp_path / "broken.py", tmp_path / "sound.py"
    broken.write_text(program.format(unscale="pass"), encoding="utf-8")
    sound.write_text(program.format(unscale=unscale), encoding="utf-8")
    report = check([str(broken), str(sound)], select=["clip-before-unscale"], assume={})
    assert [Path(finding.place.path).name for finding in report.findings] == ["broken.py"]


OPTIMIZERS = """
import torch
from torch import nn

from kept import EightBit


def main(args):
    dtype = {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}[args.precision]
    net = nn.Linear(8, 8).to("cuda", dtype=dtype)
    if args.small:
        optimizer = EightBit(net.parameters())
    else:
        optimizer = torch.optim.AdamW({weights}, lr=1e-5)
    for batch in args.batches:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main(parsed())
"""


def test_two_paths_are_enough_for_the_optimizer_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "WIDEST", 2)
    broken, sound = tmp_path / "broken.py", tmp_path / "sound.py"
    broken.write_text(OPTIMIZERS.format(weights="net.parameters()"), encoding="utf-8")
    sound.write_text(OPTIMIZERS.format(weights="copies(net)"), encoding="utf-8")
    report = check([str(broken), str(sound)], select=["bf16-only-weights"], assume={})
    assert [Path(finding.place.path).name for finding in report.findings] == ["broken.py"]


SETTINGS = """
import torch
from torch import nn


class Settings:
    dtype = "float16"
    steps = 10

    def __init__(self, **given):
        {taken}


def main(given):
    settings = Settings(**given)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=settings.dtype == {enabled!r})
    kind = {{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}}[settings.dtype]
    for batch in load(settings.steps):
        with torch.autocast("cuda", dtype=kind):
            loss = net(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


main(parsed())
"""
SET = "for name, value in given.items():\n            setattr(self, name, value)"


@pytest.mark.parametrize(
    ("taken", "enabled", "told"),
    [(SET, "bfloat16", True), (SET, "float16", False), ('setattr(self, "steps", 20)', "bfloat16", False)],
)
@pytest.mark.parametrize("width", [2, 64])
def test_a_class_names_a_dtype_that_its_objects_may_be_given_another_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str, enabled: str, told: bool, width: int
):
    monkeypatch.setattr(reading, "WIDEST", width)
    (tmp_path / "train.py").write_text(SETTINGS.format(taken=taken, enabled=enabled), encoding="utf-8")
    found = check([str(tmp_path / "train.py")], select=["scaler-with-bf16"]).findings
    assert [(each.place.line, each.confidence) for each in found] == [(19, "certain")] * told


PRECISIONS = """
import torch
from torch import nn


def main(args):
    net = nn.Linear(8, 8)
    if args.precision == "amp" or args.precision == "fp32":
        net.float()
    if args.precision == "fp16":
        {cast}
    if args.deep:
        net.requires_grad_(True)
    if args.rank == 0:
        net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda") if args.precision == "amp" else None
    for batch in args.batches:
        with torch.autocast("cuda", enabled=args.precision == "amp"):
            loss = net(batch).square().mean()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


main(parsed())
"""


def test_of_two_paths_one_is_that_on_which_float32_is_ruled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "WIDEST", 2)
    broken, sound = tmp_path / "broken.py", tmp_path / "sound.py"
    broken.write_text(PRECISIONS.format(cast="net.half()"), encoding="utf-8")
    sound.write_text(PRECISIONS.format(cast="net.eval()"), encoding="utf-8")
    report = check([str(broken), str(sound)], select=["bf16-only-weights"], assume={})
    assert [Path(finding.place.path).name for finding in report.findings] == ["broken.py"]
