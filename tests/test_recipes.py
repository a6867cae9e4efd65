"""What the summary of a run says of how a program trains, and of how much was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import catalogue, check
from precisionlint.findings import Coverage

STEP = """
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).float(), y)
        {backward}
        optimizer.step()
"""
PREPARED = """import torch
{imports}

def main(model, loader, precision):
    engine = {engine}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = engine.{setup}(model, optimizer)
""" + STEP.format(backward="engine.backward(loss)")
LIGHTNING = """import lightning as L
import torch


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(loader):
    L.Trainer({precision}).fit(Module(), loader)
"""
SCALER = """import torch


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
MASTERS = """import torch


def main(model, loader):
    model = model.cuda().half()
    masters = [p.detach().clone().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for x, y in loader:
        model(x).float().mean().backward()
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        for p, master in zip(model.parameters(), masters):
            p.data.copy_(master.data)
"""
ADAPTERS = """import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main(loader):
    model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        optimizer.zero_grad()
        model(**x).loss.backward()
        optimizer.step()
"""


def coverage(folder: Path, **files: str) -> Coverage:
    (folder / "pyproject.toml").touch()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return check([str(folder)], select=frozenset(catalogue.load()), assume={}).coverage


def prepared(engine: str, setup: str = "prepare") -> str:
    framework = "accelerate" if engine.startswith("Acc") else "lightning.fabric"
    imports = f"from {framework} import {engine.partition('(')[0]}\n"
    return PREPARED.format(imports=imports, engine=engine, setup=setup)


@pytest.mark.parametrize(
    ("program", "recipe"),
    [
        (prepared("Accelerator(mixed_precision='fp16')"), "fp16 autocast + accelerate's scaler, AdamW on fp32 weights"),
        (prepared("Accelerator(mixed_precision='bf16')"), "bf16 autocast, AdamW on fp32 weights"),
        (prepared("Accelerator(mixed_precision='no')"), "no autocast, AdamW on fp32 weights"),
        (prepared("Accelerator()"), "what accelerate is told to compute in, AdamW on fp32 weights"),
        (prepared("Fabric(precision='16-mixed')", "setup"), "fp16 autocast + fabric's scaler, AdamW on fp32 weights"),
        (
            LIGHTNING.format(precision="precision='16-mixed'"),
            "fp16 autocast + lightning's scaler, AdamW on fp32 weights",
        ),
        (LIGHTNING.format(precision="max_epochs=3"), "no autocast, AdamW on fp32 weights"),
        (SCALER.format(enabled="True"), "bf16 autocast + GradScaler, AdamW on fp32 weights"),
        (SCALER.format(enabled="False"), "bf16 autocast, AdamW on fp32 weights"),
        (MASTERS, "no autocast, AdamW on fp32 copies of fp16 weights"),
        (ADAPTERS, "no autocast, AdamW on adapters over bf16 weights"),
    ],
)
def test_a_recipe_names_what_computes_in_half_and_what_is_stepped(tmp_path: Path, program: str, recipe: str):
    assert coverage(tmp_path, train=program).recipes == (recipe,)


EVALUATED = """import torch


def evaluate(model, x):
    {cast}
    model(x)
    {back}


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        evaluate(model, x)
"""


@pytest.mark.parametrize(
    ("cast", "back", "weights"),
    [
        ("model.half()", "model.float()", "fp32"),
        ("model.half()", "pass", "fp16"),
        ("if len(x) > 8:\n        model.half()", "model.float()", "fp32"),
        ("model.float()\n    if len(x) > 8:\n        model.half()", "pass", "fp16"),
        ("dtype = next(model.parameters()).dtype; model.bfloat16()", "model.to(dtype)", "fp32"),
        ("if len(x) > 8:\n        model.half()\n    else:\n        model.float()", "pass", "fp16"),
    ],
)
def test_weights_that_go_back_after_an_evaluation_are_fp32(tmp_path: Path, cast: str, back: str, weights: str):
    found = coverage(tmp_path, train=EVALUATED.format(cast=cast, back=back))
    assert found.recipes == (f"no autocast, AdamW on {weights} weights",)


ENGINE = """import torch


def epoch(model, loader, optimizer, scaler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
MAIN = """import torch
from engine import epoch


def main(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    while True:
        epoch(model, loader, optimizer, scaler)
"""


def test_what_two_files_come_across_is_counted_once(tmp_path: Path):
    found = coverage(tmp_path, engine=ENGINE, main=MAIN)
    assert (found.programs, found.loops, found.optimizers, found.scalers) == (2, 2, 1, 1)


def test_a_file_that_only_defines_one_function_is_one_program(tmp_path: Path):
    assert coverage(tmp_path, train=SCALER.format(enabled="True")).programs == 1
    assert coverage(tmp_path, train=SCALER.format(enabled="True") + "\n\nmain(None, [])\n").programs == 1


def test_one_program_with_more_paths_than_are_followed_is_told_once():
    found = check(["fixtures/projects/digits/train.py"], select=frozenset(catalogue.load()), assume={}).coverage
    assert [place.line for place in found.gave_up] == [36]
