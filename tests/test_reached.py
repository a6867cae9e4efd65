"""Programs whose training was not met, with no word of it: each clips scaled gradients, and is sound once they are unscaled before."""

from pathlib import Path

import pytest

from precisionlint import check

HEAD = "import torch\n"
STEP = """
scaler.scale(loss).backward()
{unscale}
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
"""
IN_BRANCHES = """
if torch.__version__ >= "1.6":

    class Trainer:
        def __init__(self):
            self.scaler = torch.amp.GradScaler("cuda")

        def train_step(self, model, optimizer, loss):
            scaler = self.scaler
            STEP
else:

    class Trainer:
        def train_step(self, model, optimizer, loss):
            loss.backward()
            optimizer.step()
"""
WHERE_AN_IMPORT_FAILS = """
try:
    from apex import amp
except ImportError:

    def train_step(model, optimizer, loss):
        scaler = torch.amp.GradScaler("cuda")
        STEP
"""
METHOD_IN_A_BRANCH = """
class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    if torch.cuda.is_available():

        def train_step(self, model, optimizer, loss):
            scaler = self.scaler
            STEP
"""
BY_ANOTHER_NAME = """
def make_trainer(model, optimizer, criterion, plain):
    scaler = torch.amp.GradScaler("cuda")

    def in_half(engine, loss):
        STEP

    def in_full(engine, loss):
        loss.backward()
        optimizer.step()

    if plain:
        run = in_full
    else:
        run = in_half

    def train_step(engine, batch):
        x, y = batch
        output = model(x)
        loss = criterion(output, y)
        run(engine, loss)
        return loss

    return Engine(train_step)
"""
GIVEN_BACK = """
def make_step(model, optimizer):
    scaler = torch.amp.GradScaler("cuda")

    def step(loss):
        STEP

    return step
"""
GIVEN_BACK_IN_A_TABLE = """
def make_steps(model, optimizer):
    scaler = torch.amp.GradScaler("cuda")

    def evaluate(loss):
        return loss.item()

    def step(loss):
        STEP

    return {"evaluate": evaluate, "train": step}, len
"""
SET_BY_WHAT_IS_NOT_RUN = """
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.is_ready = False
        self.scaler = torch.amp.GradScaler("cuda")

    def connect(self, rank, address):
        print("connecting", rank)
        print("to", address)
        self.rank = rank
        self.address = address
        self.is_ready = True

    def train_step(self, loss):
        if not self.is_ready:
            raise RuntimeError("not connected")
        model, optimizer, scaler = self.model, self.optimizer, self.scaler
        STEP


def main(model, optimizer, losses):
    trainer = Trainer(model, optimizer)
    trainer.connect(0, "localhost")
    for loss in losses:
        trainer.train_step(loss)
"""
FILLED_BY_WHAT_IS_NOT_RUN = """
class Counts:
    def __init__(self):
        self.counts = {}

    def register(self, name, first):
        print("counting", name)
        print("from", first)
        if first is None:
            first = 0
        self.counts[name] = first

    def count(self, name):
        assert name in self.counts
        self.counts[name] += 1


def main(model, optimizer, losses):
    counts = Counts()
    counts.register("steps", None)
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        counts.count("steps")
        STEP
"""
FILLED_BY_OTHERS = """
MODELS = {}


def register(name, cls):
    MODELS[name] = cls


def build(name):
    if name not in MODELS:
        raise KeyError(name)
    model = MODELS[name]()
    return model.to(memory_format=torch.channels_last)


def main(name, losses):
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        STEP
"""
ENDED_BY_A_SIGNAL = """
import signal
import sys


def main(model, optimizer, losses):
    scaler = torch.amp.GradScaler("cuda")

    def leave(number, frame):
        torch.save(model.state_dict(), "last.pt")
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    for loss in losses:
        STEP
"""
A_NUMBER_OF_ANY_KIND = """
import numbers


def warm_up(optimizer, steps):
    if not isinstance(steps, numbers.Integral):
        raise TypeError(steps)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / steps)


def main(model, optimizer, losses):
    scaler = torch.amp.GradScaler("cuda")
    scheduler = warm_up(optimizer, 100)
    for loss in losses:
        STEP
"""
OUT_OF_A_TUPLE = """
def train_step(state, loss):
    model, optimizer, scaler = state
    STEP


def main(state, losses):
    for loss in losses:
        train_step(state, loss)
"""
OUT_OF_A_NAMED_TUPLE = """
from typing import NamedTuple


class State(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


def train_step(state, loss):
    model, optimizer, scaler = state
    STEP


def main(model, optimizer, losses):
    state = State(model, optimizer, torch.amp.GradScaler("cuda"))
    for loss in losses:
        train_step(state, loss)
"""
PROGRAMS = {
    "a class in a branch of its file": IN_BRANCHES,
    "a function where an import fails": WHERE_AN_IMPORT_FAILS,
    "a method in a branch of its class": METHOD_IN_A_BRANCH,
    "a function by another name": BY_ANOTHER_NAME,
    "a function that is given back": GIVEN_BACK,
    "functions that are given back in a table": GIVEN_BACK_IN_A_TABLE,
    "an attribute that a method sets which is not run": SET_BY_WHAT_IS_NOT_RUN,
    "a table that a method fills which is not run": FILLED_BY_WHAT_IS_NOT_RUN,
    "a registry that others fill": FILLED_BY_OTHERS,
    "a function that ends the program when it is called": ENDED_BY_A_SIGNAL,
    "a constant that is a number of some kind": A_NUMBER_OF_ANY_KIND,
    "a scaler out of a tuple": OUT_OF_A_TUPLE,
    "a scaler out of a named tuple": OUT_OF_A_NAMED_TUPLE,
}


def written(program: str, unscale: str) -> str:
    """The program with its step, indented as it stands there."""
    lines = []
    for line in (HEAD + program).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() == "STEP":
            lines += [indent + each for each in STEP.format(unscale=unscale).strip().splitlines()]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_is_followed_to_its_step(tmp_path: Path, program: str) -> None:
    path = tmp_path / "program.py"
    rules = ["clip-before-unscale", "missing-scaler-update", "double-unscale", "step-bypasses-scaler"]
    for unscale, told in (("pass", ["clip-before-unscale"]), ("scaler.unscale_(optimizer)", [])):
        path.write_text(written(program, unscale))
        assert [each.rule for each in check([path.as_posix()], select=rules).findings] == told


GIVEN_BACK_IN_ANY_ORDER = """
import torch


def make(model, optimizer):
    scaler = torch.amp.GradScaler("cuda")

    def backward(loss):
        scaler.scale(loss).backward()

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def unscale():
        scaler.unscale_(optimizer)

    return backward, clip, unscale
"""


def test_nobody_knows_which_of_several_functions_is_called_first(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text(GIVEN_BACK_IN_ANY_ORDER)
    assert not check([path.as_posix()], select=["clip-before-unscale", "double-unscale"]).findings


PROPERTY_WITH_A_SETTER = """
import torch


class Trainer:
    def __init__(self, model):
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    @property
    def optimizer(self):
        if not hasattr(self, "_optimizer"):
            raise RuntimeError("no optimizer yet")
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer):
        self._optimizer = optimizer

    def train_step(self, loss):
        self.scaler.scale(loss).backward()
        STEP
        self.scaler.update()
"""


def test_a_property_with_a_setter_is_what_it_gives(tmp_path: Path) -> None:
    path = tmp_path / "trainer.py"
    for step, told in (("self.optimizer.step()", ["step-bypasses-scaler"]), ("self.scaler.step(self.optimizer)", [])):
        path.write_text(PROPERTY_WITH_A_SETTER.replace("STEP", step))
        rules = ["step-bypasses-scaler", "missing-scaler-update"]
        assert [each.rule for each in check([path.as_posix()], select=rules).findings] == told


OPTIMIZERS_IN_PAIRS = """
import torch


def main(parts, losses):
    optimizers = dict([(name, torch.optim.SGD(part.parameters(), lr=0.1)) for name, part in parts.items()])
    scaler = torch.amp.GradScaler("cuda")
    for loss in losses:
        scaler.scale(loss).backward()
        STEP
        scaler.update()
"""


def test_optimizers_in_a_dict_of_pairs_are_optimizers(tmp_path: Path) -> None:
    path = tmp_path / "trainer.py"
    for step, told in (('optimizers["a"].step()', ["step-bypasses-scaler"]), ('scaler.step(optimizers["a"])', [])):
        path.write_text(OPTIMIZERS_IN_PAIRS.replace("STEP", step))
        rules = ["step-bypasses-scaler", "missing-scaler-update"]
        assert [each.rule for each in check([path.as_posix()], select=rules).findings] == told


NO_WORD_OF_TORCH = """
from .amp import GradScaler, clip_grad_norm_


class OptimizerHook:
    def __init__(self):
        self.loss_scaler = GradScaler()

    def after_train_iter(self, runner):
        self.loss_scaler.scale(runner.outputs["loss"]).backward()
        clip_grad_norm_(runner.model.parameters(), 1.0)
        self.loss_scaler.step(runner.optimizer)
        self.loss_scaler.update()
"""


def test_a_file_that_only_has_a_scaler_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hook.py"
    path.write_text(NO_WORD_OF_TORCH)
    assert check([path.as_posix()], select=["clip-before-unscale"]).coverage.programs == 1


LAUNCHED = """
import functools

import lightning as L
import torch
from torch import nn


def setup(data):
    fabric = L.Fabric(devices=1, precision=PRECISION)
    LAUNCH


def main(fabric, data, lr):
    model = fabric.setup_module(nn.Linear(8, 8))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr))
    for x in data:
        fabric.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_fabric_launches_is_followed_with_its_fabric(tmp_path: Path) -> None:
    path = tmp_path / "tune.py"
    whole = "fabric.launch(main, data, 1e-5)"
    part = "fabric.launch(function=functools.partial(main, data=data, lr=1e-5))"
    for launch, precision, told in (
        (whole, "bf16-true", [10]),
        (part, "bf16-true", [10]),
        (whole, "bf16-mixed", []),
        ("fabric.launch()", "bf16-true", []),
    ):
        path.write_text(LAUNCHED.replace("LAUNCH", launch).replace("PRECISION", repr(precision)))
        report = check([path.as_posix()], select=["lightning-true-precision"])
        assert [each.place.line for each in report.findings] == told
