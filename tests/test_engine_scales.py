"""Gradients that a framework's own scaler has scaled: who reads or clips them before it unscales, and who comes after that."""

from pathlib import Path

import pytest

from precisionlint import check

ACCELERATE = """
import torch
from accelerate import Accelerator


def train(model, loader, args):
    accelerator = Accelerator(mixed_precision={precision})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        optimizer.zero_grad()
        accelerator.backward(model(x).mean())
        {before}
        accelerator.log({{"norm": torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()}})
        optimizer.step()
"""
FABRIC = """
import torch
from lightning.fabric import Fabric


def train(model, loader):
    fabric = Fabric(precision={precision})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    for x in loader:
        optimizer.zero_grad()
        fabric.backward(model(x).mean())
        {first}
        {last}
        optimizer.step()
"""
HOOK = """
import lightning as L
import torch
from torch import nn


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def {hook}(self, *args):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
{main}
"""
CALLBACK = """
import torch
from pytorch_lightning.callbacks import Callback


class Norms(Callback):
    def {hook}(self, trainer, module, *args):
        module.log("norm", torch.stack([p.grad.norm() for p in module.parameters()]).norm())
"""
READ = "norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
OWN_CLIP = "fabric.clip_gradients(model, optimizer, max_norm=1.0)"


def told(folder: Path, program: str) -> list[tuple[str, str]]:
    (folder / "train.py").write_text(program)
    found = check([str(folder / "train.py")], select=["loss-scaling", "trainers"], min_confidence="possible").findings
    return [(each.rule, each.confidence) for each in found]


@pytest.mark.parametrize(
    ("precision", "before", "confidence"),
    [
        ('"fp16"', "pass", "certain"),
        ('"fp16" if args.half else "no"', "pass", "certain"),
        ('"bf16"', "pass", ""),
        ('"no"', "pass", ""),
        ('"fp16"', "accelerator.unscale_gradients()", ""),
        ('"fp16"', "accelerator.clip_grad_norm_(model.parameters(), 1.0)", ""),
    ],
)
def test_accelerate_unscales_in_its_clip_or_in_the_step(
    tmp_path: Path, precision: str, before: str, confidence: str
) -> None:
    program = ACCELERATE.format(precision=precision, before=before)
    assert told(tmp_path, program) == ([("scaled-gradients-read", confidence)] if confidence else [])


@pytest.mark.parametrize(
    ("precision", "first", "last", "rules"),
    [
        ('"16-mixed"', READ, OWN_CLIP, ["scaled-gradients-read"]),
        ('"16-mixed"', CLIP, "pass", ["clip-before-unscale"]),
        ('"16-mixed"', OWN_CLIP, READ, []),
        ('"bf16-mixed"', READ, CLIP, []),
    ],
)
def test_fabric_unscales_in_its_clip_or_in_the_step(
    tmp_path: Path, precision: str, first: str, last: str, rules: list[str]
) -> None:
    program = FABRIC.format(precision=precision, first=first, last=last)
    assert told(tmp_path, program) == [(rule, "certain") for rule in rules]


@pytest.mark.parametrize(
    ("hook", "precision", "confidence"),
    [
        ("on_after_backward", "16-mixed", "certain"),
        ("on_after_backward", "bf16-mixed", "possible"),  # by this trainer it is sound; another one may run the module
        ("on_after_backward", "", "possible"),
        ("on_before_optimizer_step", "16-mixed", ""),
    ],
)
def test_lightning_calls_one_hook_before_it_unscales(
    tmp_path: Path, hook: str, precision: str, confidence: str
) -> None:
    main = f'\n\ndef main(loader):\n    L.Trainer(precision="{precision}").fit(Net(), loader)\n' if precision else ""
    program = HOOK.format(hook=hook, main=main)
    assert told(tmp_path, program) == ([("scaled-gradients-read", confidence)] if confidence else [])


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_a_callback_has_the_same_hooks(tmp_path: Path, hook: str) -> None:
    expected = [("scaled-gradients-read", "possible")] if hook == "on_after_backward" else []
    assert told(tmp_path, CALLBACK.format(hook=hook)) == expected
