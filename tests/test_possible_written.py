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
