"""Loss scales that a program keeps by itself: a number that the loss is multiplied by, and the gradients divided by before they are used."""

from pathlib import Path

import pytest

from precisionlint import check

PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn

torch.set_float32_matmul_precision("high")
{constant}


def train(loader):
    model = nn.Linear(64, 64).to("cuda")
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = F.mse_loss(model(x), y)
        {scaled}
        {then}
        optimizer.step()
"""
DIVIDED = "for p in model.parameters():\n            p.grad.{}"
CLIPPED = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
BACKWARD = "(loss * 128.0).backward()"


def found(
    folder: Path,
    scaled: str,
    then: str,
    constant: str = "",
    optimizer: str = "SGD",
    dtype: str = "float16",
    **settings: object,
) -> list[tuple[str, str]]:
    text = PROGRAM.format(constant=constant, optimizer=optimizer, scaled=scaled, then=then, dtype=dtype)
    (folder / "train.py").write_text(text)
    report = check([str(folder / "train.py")], **settings)  # type: ignore[arg-type]
    assert not report.errors
    return [(each.rule, each.confidence) for each in report.findings]


@pytest.mark.parametrize(
    ("scaled", "then", "constant"),
    [
        (BACKWARD, DIVIDED.format("div_(128.0)"), ""),
        (BACKWARD, DIVIDED.format("mul_(1 / 128)"), ""),
        (BACKWARD, DIVIDED.format("data.div_(128)"), ""),
        (BACKWARD, "torch._foreach_div_([p.grad for p in model.parameters()], 128.0)", ""),
        ("(loss * S / 4).backward()", "for p in model.parameters():\n            p.grad = p.grad / S", "S = 2.0**10"),
        ("loss *= S\n        loss.backward()", "for p in model.parameters():\n            p.grad /= S", "S = 1000"),
        (BACKWARD, DIVIDED.format("div_(128.0)\n        " + CLIPPED), ""),
    ],
)
def test_a_number_that_is_divided_out_is_a_loss_scale(tmp_path: Path, scaled: str, then: str, constant: str) -> None:
    assert found(tmp_path, scaled, then, constant) == []
    assert found(tmp_path, scaled, then, constant, select=["fp16-without-scaler"]) == []


@pytest.mark.parametrize(
    ("scaled", "then", "rule"),
    [
        ("loss.backward()", DIVIDED.format("div_(128.0)"), "fp16-without-scaler"),  # the ranks, perhaps
        ("(loss * 0.5).backward()", "pass", "fp16-without-scaler"),
        ("(loss * 10.0).backward()", "pass", "fp16-without-scaler"),  # a weight
        ("(loss * 128.0).backward()", DIVIDED.format("div_(4)"), "step-bypasses-scaler"),
        ("(loss * 128.0).backward()", "pass", "step-bypasses-scaler"),
        ("(loss * LOSS_SCALE).backward()", "pass", "step-bypasses-scaler"),
        ("(loss * 128.0).backward()", CLIPPED + "\n        " + DIVIDED.format("div_(128.0)"), "clip-before-unscale"),
    ],
)
def test_one_that_is_not_or_is_too_late(tmp_path: Path, scaled: str, then: str, rule: str) -> None:
    assert [name for name, _ in found(tmp_path, scaled, then, "LOSS_SCALE = 512.0")] == [rule]
    alone = found(tmp_path, scaled, then, "LOSS_SCALE = 512.0", select=[rule])
    assert [name for name, _ in alone] == [rule]


def test_adam_divides_a_number_out_by_itself(tmp_path: Path) -> None:
    assert found(tmp_path, BACKWARD, "pass") == [("step-bypasses-scaler", "likely")]
    assert found(tmp_path, BACKWARD, "pass", optimizer="Adam") == []
    shown = found(
        tmp_path, BACKWARD, "pass", optimizer="Adam", select=["step-bypasses-scaler"], min_confidence="possible"
    )
    assert shown == [("step-bypasses-scaler", "possible")]


@pytest.mark.parametrize("then", ["pass", CLIPPED])
def test_a_number_that_weighs_a_loss_in_bf16_is_none(tmp_path: Path, then: str) -> None:
    assert found(tmp_path, BACKWARD, then, dtype="bfloat16") == []


GAN = """
import torch
import torch.nn.functional as F
from torch import nn

torch.set_float32_matmul_precision("high")


def train(loader, loss_scale):
    g, d = nn.Linear(64, 10).to("cuda"), nn.Linear(64, 10).to("cuda")
    opt_g = torch.optim.SGD(g.parameters(), lr=0.1)
    opt_d = torch.optim.SGD(d.parameters(), lr=0.1)
    scaler = {scaler}
    for x, y in loader:
        opt_g.zero_grad()
        opt_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss_g, loss_d = F.mse_loss(g(x), y), F.mse_loss(d(x), y)
        {backwards}
        nn.utils.clip_grad_norm_({clipped}.parameters(), 1.0)
        {divided}
        {step_g}
        opt_d.step()
"""
PLAIN = "loss_d.backward()"


@pytest.mark.parametrize("scale", ["1000", "loss_scale"])
@pytest.mark.parametrize(
    ("backwards", "clipped", "told"),
    [
        (["(loss_g * {0}).backward()"], "g", "certain"),
        (["(loss_g * {0}).backward()", "(loss_d * {0}).backward()"], "d", "certain"),
        (["(loss_g * {0}).backward()", PLAIN], "d", "possible"),
        ([PLAIN, "(loss_g * {0}).backward()"], "d", "possible"),
    ],
)
def test_a_clip_of_gradients_of_another_loss(
    tmp_path: Path, scale: str, backwards: list[str], clipped: str, told: str
) -> None:
    divided = f"for p in (*g.parameters(), *d.parameters()):\n            p.grad.div_({scale})"
    both = "\n        ".join(backwards).format(scale)
    text = GAN.format(scaler=None, backwards=both, clipped=clipped, divided=divided, step_g="opt_g.step()")
    file = tmp_path / "train.py"
    file.write_text(text)
    shown = check([str(file)], select=["clip-before-unscale"], min_confidence="possible").findings
    assert [(each.rule, each.confidence) for each in shown] == [("clip-before-unscale", told)]
    if scale == "loss_scale" and told == "certain":
        assert "its threshold meets a norm 'loss_scale' times too large, so" in shown[0].message


def test_a_clip_of_a_loss_that_a_scaler_was_not_given(tmp_path: Path) -> None:
    backwards = "scaler.scale(loss_g).backward()\n        loss_d.backward()"
    step = "scaler.step(opt_g)\n        scaler.update()"
    for clipped, told in [("g", "certain"), ("d", "possible")]:
        text = GAN.format(
            scaler="torch.amp.GradScaler('cuda')", backwards=backwards, clipped=clipped, divided="pass", step_g=step
        )
        (tmp_path / "train.py").write_text(text)
        report = check([str(tmp_path / "train.py")], select=["clip-before-unscale"], min_confidence="possible")
        assert [each.confidence for each in report.findings] == [told]
