"""What is written as it must not be is possible, though no path to it could be followed."""

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

UNFOLLOWED = """
import torch
from torch import amp
from torch.amp import autocast

from engines import Engine


class Trainer(Engine):
    def __init__(self, config):
        super().__init__(config)
        self.registry = {{}}

    @Engine.register("fit")
    def fit(self, loader):
        for task in self.registry.values():
            for batch in loader:
                with {region}:
                    loss = task(batch)
                    {inside}
                {outside}
                task.advance()
"""


def told(folder: Path, rule: str, text: str) -> list[tuple[int, str]]:
    (folder / "case.py").write_text(textwrap.dedent(text), encoding="utf-8")
    found = check([str(folder / "case.py")], select=["all"]).findings
    return [(each.place.line, each.confidence) for each in found if each.rule == rule]


@pytest.mark.parametrize(
    ("region", "inside", "outside", "lines"),
    [
        ("autocast('cuda', enabled=self.mixed)", "loss.backward()", "pass", [20]),
        ("torch.autocast('cuda') if self.mixed else self.plain", "self.scaler.scale(loss).backward()", "pass", [20]),
        ("amp.autocast('cuda'), self.sync()", "self.accelerator.backward(loss)", "pass", [20]),
        ("self.accelerator.autocast()", "self.accelerator.backward(loss)", "pass", [20]),
        ("autocast('cuda', enabled=self.mixed)", "pass", "loss.backward()", []),
        ("autocast('cuda', enabled=False)", "loss.backward()", "pass", []),
        ("self.region()", "loss.backward()", "pass", []),
        ("amp_ctx", "loss.backward()", "pass", [20]),
        ("self.amp_context", "loss.backward()", "pass", [20]),
        ("self._autocast()", "loss.backward()", "pass", [20]),
        ("amp_ctx", "pass", "loss.backward()", []),
        ("no_amp_ctx", "loss.backward()", "pass", []),
        ("te.fp8_autocast(enabled=True)", "loss.backward()", "pass", []),
        ("self.ramp_up()", "loss.backward()", "pass", []),
    ],
)
def test_a_backward_that_is_written_into_the_block_of_an_autocast(
    tmp_path: Path, region: str, inside: str, outside: str, lines: list[int]
) -> None:
    text = UNFOLLOWED.format(region=region, inside=inside, outside=outside)
    assert [line for line, _ in told(tmp_path, "backward-under-autocast", text)] == lines


SAVES = """
import torch


class Agent:
    def setup(self, config):
        self.policy, self.optimizer = build(config)
        {made}

    def write(self, path):
        state = {{
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            {kept}
        }}
        torch.save({saved}, path)


def train_epoch(agent, loader):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        scaler.scale(agent.loss(batch)).backward()
        agent.advance(scaler)
"""


@pytest.mark.parametrize(
    ("made", "kept", "saved", "count"),
    [
        ("pass", "", "state", 1),
        ("pass", "", "self.optimizer.state_dict()", 1),
        ("pass", '"scaler": self.scaler.state_dict(),', "state", 0),
        ("pass", "", "self.policy.state_dict()", 0),
        ("self.grad_scaler_state = None", "**self.scaler_state(),", "state", 0),
    ],
)
def test_a_checkpoint_in_a_file_that_saves_no_scaler(
    tmp_path: Path, made: str, kept: str, saved: str, count: int
) -> None:
    text = SAVES.format(made=made, kept=kept, saved=saved)
    found = told(tmp_path, "scaler-not-checkpointed", text)
    assert len(found) == count
    assert {confidence for _, confidence in found} <= {"possible"}


LISTED = """
import torch


def train(model, loader):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        scaler.scale(model.loss(batch)).backward()
        model.advance(scaler)


class Model:
    def write(self, path):
        state = {{"optimizers": [], "schedulers": []}}
        for each in self.{over}:
            state["{kept}"].append(each.state_dict())
        {more}
        torch.save(state, path)
"""


@pytest.mark.parametrize(
    ("over", "kept", "more", "lines"),
    [
        ("optimizers", "optimizers", "pass", [18]),
        ("schedulers", "schedulers", "pass", []),
        ("schedulers", "schedulers", "state['steps'] = [o.state_dict() for o in self.optimizers]", [18]),
        ("optimizers", "optimizers", "state['scaler'] = self.scaler.state_dict()", []),
    ],
)
def test_a_checkpoint_to_which_optimizers_are_added_one_by_one(
    tmp_path: Path, over: str, kept: str, more: str, lines: list[int]
) -> None:
    text = LISTED.format(over=over, kept=kept, more=more)
    assert told(tmp_path, "scaler-not-checkpointed", text) == [(line, "possible") for line in lines]


PARTS = """
import torch


class Fitter:
    def __init__(self, net, optimizers):
        self.net, self.optimizers = net, optimizers
        self.scaler = torch.cuda.amp.GradScaler()
        {registered}

    def collected(self):
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        {left}

    def write(self, path):
        state = {whole}
        torch.save(state, path)
"""


@pytest.mark.parametrize(
    ("registered", "left", "whole", "lines"),
    [
        ("pass", "return {'optimizers': states}", "self.collected()", [17]),
        ("pass", "return {'optimizers': states}", "{'net': self.net.state_dict(), **self.collected()}", [17]),
        ("pass", "return {'optimizers': states, 'scaler': self.scaler.state_dict()}", "self.collected()", []),
        ("pass", "print(len(states))", "self.net.state_dict()", []),
        ("pass", "return {'optimizers': states}", "self.net.collected()", []),
    ],
)
def test_a_checkpoint_that_another_function_of_the_file_collects(
    tmp_path: Path, registered: str, left: str, whole: str, lines: list[int]
) -> None:
    text = PARTS.format(registered=registered, left=left, whole=whole)
    assert [line for line, _ in told(tmp_path, "scaler-not-checkpointed", text)] == lines


HANDED = """
import torch

from files import {saver}


def steps(scaler, optimizer, net, batches):
    for batch in batches:
        scaler.scale(net(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield batch


def fit(trainer, net, batches):
    trainer.scaler = torch.amp.GradScaler("cuda")
    for epoch, _ in enumerate(steps(trainer.scaler, trainer.optimizer, net, batches)):
        {saver}({given})
"""


@pytest.mark.parametrize(
    ("saver", "given", "count"),
    [
        ("save_checkpoint", "net, trainer.optimizer, epoch", 1),
        ("save_model_and_state", "net=net, optimizer=trainer.optimizer", 1),
        ("save_checkpoint", "net, trainer.optimizer, trainer.scaler, epoch", 0),
        ("save_checkpoint", "net, epoch", 0),
        ("save_checkpoint", "**trainer.state(trainer.optimizer)", 0),
        ("saved_checkpoints", "trainer.optimizer", 0),
    ],
)
def test_what_writes_the_checkpoint_is_handed_an_optimizer_alone(
    tmp_path: Path, saver: str, given: str, count: int
) -> None:
    assert len(told(tmp_path, "scaler-not-checkpointed", HANDED.format(saver=saver, given=given))) == count


def test_what_a_file_writes_itself_is_read_there(tmp_path: Path) -> None:
    text = HANDED.format(saver="save_checkpoint", given="net, trainer.optimizer, epoch")
    own = "def save_checkpoint(net, optimizer, epoch):\n    torch.save(net.state_dict(), f'{epoch}.pt')\n"
    text = text.replace("from files import save_checkpoint\n", own)
    assert told(tmp_path, "scaler-not-checkpointed", text) == []


OWNER = """
import torch


class {name}:
    def __init__(self, inner, **settings):
        self.inner = inner
        self._grad_scaler = torch.cuda.amp.GradScaler(**settings)

    @property
    def scaler(self):
        return self._grad_scaler

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def step(self):
        {steps}

    {kept}
"""


@pytest.mark.parametrize(
    ("name", "steps", "kept", "lines"),
    [
        ("ScaledOptimizer", "self.scaler.step(self.inner)", "", [8]),
        ("StepHook(Hook)", "self._grad_scaler.step(self.inner)", "", [8]),
        ("Wrapped", "self.scaler.step(self.inner)", "def load_state_dict(self, state): self.inner.load(state)", [8]),
        ("ScaledOptimizer", "self.scaler.step(self.inner)", "def state(self): return self.scaler.state_dict()", []),
        ("ScaledOptimizer", "self.inner.step()", "", []),
        ("ScaledOptimizer", "self.scaler.step(self.inner)", "def keep(self): self.register_stateful('scaler')", []),
        ("Model", "self.scaler.step(self.inner)", "", []),
        ("StepHook(Hook)", "self.scaler.step(self.inner)", "def write(self, path): torch.save(self.inner, path)", []),
    ],
)
def test_an_optimizer_or_a_hook_that_keeps_its_scaler_to_itself(
    tmp_path: Path, name: str, steps: str, kept: str, lines: list[int]
) -> None:
    text = OWNER.format(name=name, steps=steps, kept=kept)
    assert [line for line, _ in told(tmp_path, "scaler-not-checkpointed", text)] == lines
