"""Gradients that are handed to a function: it is followed, although it says no word of gradients itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

SHOW = """
import torch


def show(board, values, step):
    if board is None:
        return
    prefix = f"step {{step}}"
    largest = 0.0
    {taken}
    board.add(prefix, largest)


def show_gradients(board, model, step):
    found = []
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        grad = p.grad.data.detach()
        found.append(grad)
        {each}
    {all}
"""
TRAIN = """
import torch
from board import show_gradients


def main(model, loader, board, limit):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for step, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        {first}
        show_gradients(board, model, step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
NORM = "largest = torch.norm(values).float()"
EACH = "show(board, grad, step)"
CLIPPED = "if limit > 0: scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), limit)"


def told(folder: Path, first: str, taken: str, each: str = "pass", of_all: str = "pass") -> list[int]:
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    (folder / "board.py").write_text(SHOW.format(taken=taken, each=each, all=of_all), encoding="utf-8")
    (folder / "train.py").write_text(TRAIN.format(first=first), encoding="utf-8")
    report = check([str(folder / "train.py")], select=["scaled-gradients-read"])
    return [each.place.line for each in report.findings]


@pytest.mark.parametrize(
    ("each", "of_all", "taken"),
    [
        (EACH, "pass", NORM),
        (EACH, "pass", "print(values.abs().max().item())"),
        ("pass", "show(board, found, step)", "largest = sum(each.norm() for each in values)"),
    ],
)
def test_what_is_handed_scaled_gradients_reads_them(tmp_path: Path, each: str, of_all: str, taken: str) -> None:
    assert told(tmp_path, "pass", taken, each, of_all) == [14]
    assert told(tmp_path, CLIPPED, taken, each, of_all) == [14]
    assert told(tmp_path, "scaler.unscale_(optimizer)", taken, each, of_all) == []


@pytest.mark.parametrize("taken", ["largest = values.shape[0]", "largest = torch.isfinite(values).all()"])
def test_what_does_not_depend_on_the_scale_is_not_told(tmp_path: Path, taken: str) -> None:
    assert told(tmp_path, "pass", taken, EACH) == []


MEASURED = """
import torch


{decorator}
def total(parameters):
    grads = [p.grad for p in parameters if p.grad is not None]
    if len(grads) == 0:
        return None
    norms = []
    for grad in grads:
        norms.append(torch.linalg.vector_norm(grad))
    return torch.linalg.vector_norm(torch.stack(norms))


def main(model, loader, board):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        {first}
        board.log(total(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("decorator", ["", "@torch.no_grad()", "@torch.inference_mode()"])
@pytest.mark.parametrize(("first", "lines"), [("pass", [12]), ("scaler.unscale_(optimizer)", [])])
def test_gradients_are_measured_where_none_are_recorded(
    tmp_path: Path, decorator: str, first: str, lines: list[int]
) -> None:
    (tmp_path / "train.py").write_text(MEASURED.format(decorator=decorator, first=first), encoding="utf-8")
    found = check([str(tmp_path / "train.py")], select=["scaled-gradients-read"]).findings
    assert [each.place.line for each in found] == lines


BY_MODULE = """
import torch
from house import gradients, training


def main(model, loader, board):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for step, x in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        {first}
        board.add({measured}, step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("measured", "first", "lines"),
    [
        ("gradients.stats(model)", "pass", [14]),
        ("training.gradient_statistics(model)", "pass", [14]),
        ("gradients.stats(model)", "scaler.unscale_(optimizer)", []),
        ("gradients.checkpoint(model)", "pass", []),
        ("training.stats(model)", "pass", []),
    ],
)
def test_what_measures_gradients_by_the_name_of_its_module(
    tmp_path: Path, measured: str, first: str, lines: list[int]
) -> None:
    (tmp_path / "train.py").write_text(BY_MODULE.format(measured=measured, first=first), encoding="utf-8")
    report = check([str(tmp_path / "train.py")], select=["scaled-gradients-read"])
    assert [each.place.line for each in report.findings] == lines
