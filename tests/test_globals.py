"""Globals that functions set: what stands at the top of a file is where they begin, not what a program finds in them."""

from pathlib import Path

import pytest

from precisionlint import check

ARGUMENTS = """
import torch

_ARGS = None


def get_args():
    ensure(_ARGS)
    return _ARGS


{setter}


def ensure(value):
    assert value is not None, "not set"
    torch.manual_seed(0)


def build(optimizer):
    return torch.amp.GradScaler("cuda")
"""
SETTER = "def set_args(args):\n    global _ARGS\n    _ARGS = args"
TRAIN = """
import torch

from arguments import build, get_args


def train(model, optimizer, loader):
    args = get_args()
    scaler = build(optimizer)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(("setter", "told"), [(SETTER, True), ("def reset():\n    _ARGS = None", False)])
def test_what_another_file_sets_before_is_not_none(tmp_path: Path, setter: str, told: bool) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "arguments.py").write_text(ARGUMENTS.format(setter=setter))
    (tmp_path / "train.py").write_text(TRAIN)
    found = check([str(tmp_path / "train.py")], select=["clip-before-unscale"]).findings
    assert [(each.place.line, each.confidence) for each in found] == [(15, "certain")] * told


SAME_FILE = """
import torch

SCALER = None
CLIP = {clip}


def init():
    global SCALER
    SCALER = torch.amp.GradScaler("cuda")


{more}


def train(model, optimizer, loader):
    if SCALER is None:
        raise RuntimeError("call init() first")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        SCALER.scale(loss).backward()
        if CLIP:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        SCALER.step(optimizer)
        SCALER.update()
"""


@pytest.mark.parametrize(
    ("clip", "more", "told"),
    [
        ("True", "", True),
        ("False", "", False),
        ("False", "def clip():\n    global CLIP\n    CLIP = True", True),
    ],
)
def test_what_a_function_of_the_file_sets_is_open(tmp_path: Path, clip: str, more: str, told: bool) -> None:
    (tmp_path / "train.py").write_text(SAME_FILE.format(clip=clip, more=more))
    found = check([str(tmp_path / "train.py")], select=["clip-before-unscale"]).findings
    assert [each.confidence for each in found] == ["certain"] * told


TWO_SETTINGS = """
import torch


def train(model, optimizer, loader, args):
    scaler = torch.amp.GradScaler("cuda", enabled=args.{first})
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16 if args.{second} else torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("first", "second", "told"), [("fp16", "bf16", False), ("use_fp16", "use_bf16", False), ("amp", "bf16", True)]
)
def test_nobody_switches_on_both_halves(tmp_path: Path, first: str, second: str, told: bool) -> None:
    (tmp_path / "train.py").write_text(TWO_SETTINGS.format(first=first, second=second))
    found = check([str(tmp_path / "train.py")], select=["scaler-with-bf16"]).findings
    assert [each.rule for each in found] == ["scaler-with-bf16"] * told


def test_a_global_declared_where_it_is_global_is_read_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import torch

global copies
global scaler

model = torch.nn.Linear(8, 8).cuda()
copies = [p for p in model.parameters()]
optimizer = torch.optim.SGD([p for p in copies if p.requires_grad], lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for x in torch.rand(10, 4, 8).cuda():
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(copies, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""")
    found = check([str(tmp_path / "train.py")], select=["clip-before-unscale"]).findings
    assert [(each.place.line, each.confidence) for each in found] == [(15, "certain")]
