"""A GPT of six layers in four recipes: known ops, counts and dtypes in both directions, and what each recipe is found
guilty of.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.audit import GPT
from torch.nn import functional

import precisionlint
from precisionlint.audit_report import AuditReport

LAYERS = 6
PRODUCTS = 4 * LAYERS + 1
RECIPES = {
    "fp32": (torch.float32, None),
    "bf16 autocast": (torch.float32, torch.bfloat16),
    "pure bf16": (torch.bfloat16, None),
    "fp16 with a scaler": (torch.float32, torch.float16),
}


def audited(recipe: str, layers: int = LAYERS) -> AuditReport:
    weights, region = RECIPES[recipe]
    torch.manual_seed(0)
    model = GPT(vocabulary=64, width=32, depth=layers, heads=2, length=16).to(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=region is torch.float16)
    tokens = torch.randint(0, 64, (2, 17))
    with precisionlint.audit(model, optimizer, scaler, name=recipe) as audit:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=region or torch.bfloat16, enabled=region is not None):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return audit.report


@pytest.fixture(scope="module")
def reports() -> dict[str, AuditReport]:
    return {recipe: audited(recipe) for recipe in RECIPES}


def kinds(report: AuditReport, family: str, phase: str) -> dict[tuple[str, str, str], int]:
    """(floating input, accumulation, first output) -> how many calls."""
    found: dict[tuple[str, str, str], int] = {}
    for op in report.ops:
        if op.family == family and op.phase == phase:
            into = next(each for each in op.inputs if "float" in each)
            key = (into, op.accumulation, op.outputs[0])
            found[key] = found.get(key, 0) + op.count
    return found


COMPUTE = {"fp32": "float32", "bf16 autocast": "bfloat16", "pure bf16": "bfloat16", "fp16 with a scaler": "float16"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_run_in_the_recipes_dtype_and_add_up_in_fp32(reports: dict[str, AuditReport], recipe: str):
    dtype = COMPUTE[recipe]
    assert kinds(reports[recipe], "matmul", "forward") == {(dtype, "float32", dtype): PRODUCTS}
    assert kinds(reports[recipe], "matmul", "backward") == {(dtype, "float32", dtype): 2 * PRODUCTS}
    assert kinds(reports[recipe], "attention", "forward") == {(dtype, "float32", dtype): LAYERS}


@pytest.mark.parametrize("recipe", RECIPES)
def test_norms_and_losses_are_fp32_unless_the_weights_are_half(reports: dict[str, AuditReport], recipe: str):
    dtype = "bfloat16" if recipe == "pure bf16" else "float32"
    assert kinds(reports[recipe], "normalisation", "forward") == {(dtype, "float32", dtype): 2 * LAYERS + 1}
    assert kinds(reports[recipe], "log-softmax", "forward") == {(dtype, "float32", dtype): 1}
    assert kinds(reports[recipe], "loss", "forward") == {(dtype, "float32", dtype): 1}
    assert reports[recipe].bytes_per_parameter == (8.0 if recipe == "pure bf16" else 16.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_backward_op_has_the_line_of_its_forward(reports: dict[str, AuditReport], recipe: str):
    backward = [op for op in reports[recipe].ops if op.phase == "backward" and not op.parameter]
    assert backward and all(op.place is not None for op in backward)
    products = {op.module for op in backward if op.family == "matmul"}
    assert {"head", "blocks.0.qkv", f"blocks.{LAYERS - 1}.down"} <= products


def test_only_pure_bf16_is_found_guilty(reports: dict[str, AuditReport]):
    found = {recipe: {finding.rule for finding in report.findings} for recipe, report in reports.items()}
    assert found.pop("pure bf16") == {"bf16-only-weights", "loss-on-half-logits"}
    assert set().union(*found.values()) == set()
