"""What a function shows that is read alone, where the project hands it one thing: the same for a file, whatever files are named with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

STEPS = """
import torch


def step(model, optimizer, scaler, loss, log=False):
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


class Stepper:
    def __init__(self, model, optimizer, use_amp):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda", enabled=use_amp)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
TRAIN = """
import torch
from steps import {name}


def main(loader, args):
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    use_amp = {use_amp}
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    stepper = {made}
    for x in loader:
        optimizer.zero_grad()
        {call}


main([], None)
"""
FUNCTION = {"name": "step", "made": "None", "call": "step(model, optimizer, scaler, model(x).mean())"}
METHOD = {"name": "Stepper", "made": "Stepper(model, optimizer, use_amp)", "call": "stepper.step(model(x).mean())"}


def found(folder: Path, *names: str, **assume: str) -> list[tuple[str, int]]:
    report = check([str(folder / name) for name in names], select=["clip-before-unscale"], assume=assume)
    return sorted((Path(each.place.path).name, each.place.line) for each in report.findings)


def write(folder: Path, **files: str) -> None:
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("parts", "line"), [(FUNCTION, 7), (METHOD, 19)])
def test_what_the_only_caller_rules_out_is_no_fault(tmp_path: Path, parts: dict[str, str], line: int) -> None:
    other = {7: 19, 19: 7}[line]
    write(tmp_path, steps=STEPS, train=TRAIN.format(use_amp="False", **parts))
    assert found(tmp_path, "steps.py") == [("steps.py", other)]
    assert found(tmp_path, ".") == [("steps.py", other)]
    write(tmp_path, train=TRAIN.format(use_amp="True", **parts))
    assert found(tmp_path, "steps.py") == found(tmp_path, ".") == [("steps.py", 7), ("steps.py", 19)]


def test_one_caller_with_the_fault_is_enough(tmp_path: Path) -> None:
    write(
        tmp_path,
        steps=STEPS,
        train=TRAIN.format(use_amp="False", **FUNCTION),
        other=TRAIN.format(use_amp="True", **FUNCTION),
    )
    assert ("steps.py", 7) in found(tmp_path, "steps.py")


def test_an_assumption_that_a_caller_takes_over_holds_in_what_it_calls(tmp_path: Path) -> None:
    write(tmp_path, steps=STEPS, train=TRAIN.format(use_amp="args.use_amp", **FUNCTION))
    assert ("steps.py", 7) in found(tmp_path, "steps.py")
    assert ("steps.py", 7) in found(tmp_path, "steps.py", use_amp="True")
    assert ("steps.py", 7) not in found(tmp_path, "steps.py", use_amp="False")
    assert found(tmp_path, "train.py", use_amp="False") == []


@pytest.mark.parametrize(
    "call",
    [
        "step(model, optimizer, args.scaler, model(x).mean())",  # nothing is known of it
        "pass",  # it only imports it
        "step(model, optimizer, args.parts[2], model(x).mean(), True)",  # a switch, but of a scaler that nobody knows
    ],
)
def test_a_caller_that_decides_nothing_rules_nothing_out(tmp_path: Path, call: str) -> None:
    write(tmp_path, steps=STEPS, train=TRAIN.format(use_amp="False", **{**FUNCTION, "call": call}))
    assert ("steps.py", 7) in found(tmp_path, "steps.py")


def test_tests_are_no_callers_of_a_library(tmp_path: Path) -> None:
    write(tmp_path, steps=STEPS, test_steps=TRAIN.format(use_amp="False", **FUNCTION))
    assert ("steps.py", 7) in found(tmp_path, "steps.py")


STEP = """
import torch


class Step:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def forward_backward(self, x):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).mean()
        self.scaler.scale(loss).backward()

    def finish(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
LOOP = """
from step import Step


def run(models, x):
    steps = {name: Step(model) for name, model in models.items()}
    for step in steps.values():
        step.forward_backward(x)
        {between}
        step.finish()
"""


@pytest.mark.parametrize(
    ("between", "lines"),
    [
        ("step.scaler.unscale_(step.optimizer)", []),
        ("pass", [17]),
        ("step.other.unscale_(step.optimizer)", [17]),
    ],
)
def test_who_steps_an_object_may_have_unscaled_before(tmp_path: Path, between: str, lines: list[int]) -> None:
    write(tmp_path, step=STEP, loop=LOOP.replace("{between}", between))
    assert found(tmp_path, "step.py") == [("step.py", line) for line in lines]
    report = check([str(tmp_path / "step.py")], select=["clip-before-unscale"], min_confidence="possible")
    assert [each.place.line for each in report.findings] == [17]


SCORES = """
import torch


def masked(scores, mask, dtype=torch.float16):
    return scores.to(dtype).masked_fill(mask, -1e9)


def plain(scores, mask, log=False):
    return scores.masked_fill(mask, -1e9)
"""
ATTEND = """
import torch
from scores import masked, plain


def attend(model, x, mask):
    scores = {call}
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    (loss + scores.sum()).backward()
"""


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("masked(x, mask, dtype=torch.float32) + plain(x, mask)", [10]),
        ("masked(x, mask, dtype=torch.float16) + plain(x, mask)", [6, 10]),
        ("masked(x, mask) + plain(x, mask)", [6, 10]),
        ("masked(x, mask) + plain(x.float(), mask)", [6]),
        (
            "masked(model(x), mask, dtype=torch.float32) + plain(model(x), mask, True)",
            [10],
        ),  # what a model gives, nobody knows
        ("masked(x, mask) + masked(x, mask, dtype=torch.float32)", [6, 10]),  # one call of two, and none of the other
    ],
)
def test_a_dtype_that_every_call_hands_over_decides(tmp_path: Path, call: str, lines: list[int]) -> None:
    write(tmp_path, scores=SCORES, attend=ATTEND.format(call=call))
    for named in ("scores.py", "."):
        report = check([str(tmp_path / named)], select=["mask-constant-overflow"], assume={})
        assert [each.place.line for each in report.findings if each.confidence != "possible"] == lines


TABLE = """
import torch


def position_table(length, width):
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
    return torch.einsum("i,j->ij", torch.arange(length).float(), frequencies).sin()


def table_of(kind, length, width):
    if kind == "none":
        return 0
    return position_table(length, width)
"""
NET = """
import torch
from table import position_table, table_of


class Net(torch.nn.Module):
    def __init__(self, length, width):
        super().__init__()
        {init}

    def forward(self, x):
        return x + {used}


def train(model, optimizer, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("init", "used", "told"),
    [
        ("self.table = position_table(length, width)", "self.table", []),
        ("pass", "position_table(x.shape[1], x.shape[2])", ["half-rope"]),
        ("self.table = table_of('sine', length, width)", "self.table", []),
        ("pass", "table_of('sine', x.shape[1], x.shape[2])", ["half-rope"]),
        ("self.table = table_of('sine', length, width)", "self.table + position_table(9, 4)", ["half-rope"]),
    ],
)
def test_what_is_made_with_a_module_meets_no_autocast(tmp_path: Path, init: str, used: str, told: list[str]) -> None:
    write(tmp_path, table=TABLE, net=NET.format(init=init, used=used))
    assert [each.rule for each in check([str(tmp_path / "table.py")], assume={}).findings] == told
