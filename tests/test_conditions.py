"""Under which configuration a fault stands, as a finding names it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

PROGRAM = """
import torch

{dtype}


def train(model, loader, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype={region}):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    train(build(), data(), None)
"""
SUPPORTED = "torch.cuda.is_available() and torch.cuda.is_bf16_supported()"


def conditions(tmp_path: Path, rule: str, **parts: str) -> list[str]:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(PROGRAM.format(**parts)), encoding="utf-8")
    return [each.when for each in check([str(file)], select=[rule], assume={}).findings]


@pytest.mark.parametrize(
    ("dtype", "enabled", "named"),
    [
        (f"dtype = 'bfloat16' if {SUPPORTED} else 'float16'", "dtype == 'float16'", "dtype == 'float16'"),
        (f"dtype = torch.bfloat16 if {SUPPORTED} else torch.float16", "dtype == torch.float16", "dtype == torch.float16"),
        (f"if {SUPPORTED}:\n    dtype = 'bfloat16'\nelse:\n    dtype = 'float16'", "dtype == 'float16'", "dtype == 'float16'"),
        ("dtype = 'float16'", "dtype == 'float16'", ""),  # nothing chose it
    ],
)  # fmt: skip
def test_a_dtype_that_an_expression_chose_is_a_condition(tmp_path: Path, dtype: str, enabled: str, named: str):
    region = "torch.float16 if dtype in ('float16', torch.float16) else torch.bfloat16"
    assert conditions(tmp_path, "clip-before-unscale", dtype=dtype, enabled=enabled, region=region) == [named]


def test_a_region_of_bf16_says_what_chose_it(tmp_path: Path):
    dtype = "import os\nHALF = torch.bfloat16 if os.environ.get('BF16') else torch.float16"
    assert conditions(tmp_path, "scaler-with-bf16", dtype=dtype, enabled="True", region="HALF") == [
        "HALF == torch.bfloat16"
    ]


SCALE = """
import torch

scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
{other}


def train(model, optimizer, loader):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update({update})
        optimizer.zero_grad()


train(build(), make(), data())
"""


@pytest.mark.parametrize(
    ("other", "update", "told"),
    [
        ("", "", 1),
        ("", "1024.0", 0),
        ("def warm(scaler, scale):\n    scaler.update(scale)", "", 0),  # which may be handed this one
        ("other_scaler = torch.amp.GradScaler('cuda')\nother_scaler.update(8.0)", "", 1),
        ("# scaler.update(8.0)", "", 1),
        ("NOTE = 'call scaler.update(scale) by hand'", "", 1),
    ],
)
def test_a_scale_that_is_set_by_hand_is_none_of_the_settings(tmp_path: Path, other: str, update: str, told: int):
    file = tmp_path / "train.py"
    file.write_text(SCALE.format(other=other, update=update), encoding="utf-8")
    report = check([str(file)], select=["scaler-settings"], assume={})
    assert [each.rule for each in report.findings] == ["scaler-settings"] * told


@pytest.mark.parametrize(("device", "told"), [("torch.device('cuda')", []), ("torch.device('cuda', 0)", ["likely"])])
def test_a_device_as_text_is_a_whole_device_where_some_have_an_index(tmp_path: Path, device: str, told: list[str]):
    text = """
    import torch

    def run(model, x, device):
        with torch.autocast(str(device), dtype=torch.bfloat16):
            return model(x.to(device))
    """
    train = f"import torch\nfrom run import run\n\nDEVICES = [{device}]\n\ndef train(model, x):\n    run(model, x, DEVICES[0]).mean().backward()\n"
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "run.py").write_text(textwrap.dedent(text), encoding="utf-8")
    (tmp_path / "train.py").write_text(train, encoding="utf-8")
    report = check([str(tmp_path / "run.py")], select=["autocast-device-mismatch"], assume={})
    assert [each.confidence for each in report.findings] == told


LISTED = """
import contextlib

import torch


def train(args, model, loader):
    if {precision} == "full":
        half = torch.float16  # what a cache is kept in: no region has it
    else:
        half = torch.bfloat16
    optimizer = torch.optim.AdamW(model.parameters())
    if {precision} in {mixed}:
        region = torch.autocast("cuda", dtype=half)
    else:
        region = contextlib.nullcontext()
    for x in loader:
        with region:
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("precision", ["args['precision']", "args.precision"])
@pytest.mark.parametrize(
    ("mixed", "found"),
    [
        ('["mixed", "mixed_buffers"]', []),
        ('("mixed", "mixed_buffers")', []),
        ('{"mixed", "mixed_buffers"}', []),
        ('["mixed", "full"]', ["fp16-without-scaler"]),
        ('("mixed", "full")', ["fp16-without-scaler"]),
    ],
)
def test_what_a_path_knows_of_a_setting_says_whether_a_list_holds_it(
    tmp_path: Path, precision: str, mixed: str, found: list[str]
):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(LISTED.format(precision=precision, mixed=mixed)), encoding="utf-8")
    assert [each.rule for each in check([str(file)], assume={}).findings if each.severity != "info"] == found


ASKED_TWICE = """
import torch


def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if args.precision in ["fp16", "amp"] else None
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.precision in ("amp", "fp16")):
            loss = model(x).mean()
        if args.precision not in {{"fp16", "amp"}}:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            {unscale}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("unscale", "found"), [("scaler.unscale_(optimizer)", []), ("pass", ["clip-before-unscale"])])
def test_a_list_that_is_asked_twice_answers_alike(tmp_path: Path, unscale: str, found: list[str]):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(ASKED_TWICE.format(unscale=unscale)), encoding="utf-8")
    assert [each.rule for each in check([str(file)], assume={}).findings] == found


MADE = """
import torch


def main(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    {made}
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        if {name} is not None:
            {name}.scale(loss).backward()
            {name}.step(optimizer)
            {name}.update()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, args.out)
"""


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("scaler = torch.amp.GradScaler('cuda')", "scaler"),
        ("grad_scaler = torch.amp.GradScaler('cuda') if args.amp else None", "grad_scaler"),
        ("amp: object = None if args.fp32 else torch.amp.GradScaler('cuda') if args.amp else None", "amp"),
        ("args.scaler = torch.amp.GradScaler('cuda') if args.amp else None", "args.scaler"),
    ],
)
def test_a_scaler_has_the_name_that_it_is_assigned_to(tmp_path: Path, made: str, name: str):
    file = tmp_path / "train.py"
    file.write_text(MADE.format(made=made, name=name), encoding="utf-8")
    messages = [each.message for each in check([str(file)], select=["scaler-not-checkpointed"], assume={}).findings]
    assert [f"but not '{name}'" in each for each in messages] == [True]


GROUPED = """
import torch
from torch import nn


def train(batches):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16()
    groups = [{groups}]
    optimizer = torch.optim.SGD(groups, {rest})
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("groups", "rest", "severity", "rate"),
    [
        ('{"params": model[0].parameters()}, {"params": model[1].parameters()}', "lr=0.1", "warning", "lr 0.1"),
        ('{"params": model[0].parameters(), "lr": 1e-5}, {"params": model[1].parameters()}', "lr=0.1", "error", "1e-05"),
        ('{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.2}', "lr=1e-5", "warning", "lr 0.2"),
        ('{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 0.2}', "lr=1e-5", "warning", "lr 0.2"),
        ('{"params": model[0].parameters(), "lr": given()}, {"params": model[1].parameters(), "lr": 0.2}', "lr=0.1", "error", "copy:"),
    ],
    ids=["rate of all", "one of its own", "each its own", "one stands", "one unknown"],
)  # fmt: skip
def test_groups_are_stepped_at_their_own_rates(
    tmp_path: Path, groups: str, rest: str, severity: str, rate: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(GROUPED.format(groups=groups, rest=rest), encoding="utf-8")
    (found,) = check([str(file)], select=["bf16-only-weights"]).findings
    assert found.severity == severity
    assert rate in found.message


TWO_REGIONS = """
import torch


def region(dtype):
    return torch.autocast("cuda", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])


def train(args, model, teacher, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        with torch.inference_mode(), region(args.teacher_dtype):
            target = teacher(x)
        with region(args.dtype):
            loss = torch.nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_region_is_named_by_what_its_own_dtype_was_looked_up_by(tmp_path: Path):
    file = tmp_path / "train.py"
    file.write_text(TWO_REGIONS, encoding="utf-8")
    (found,) = check([str(file)], select=["fp16-without-scaler"], assume={}).findings
    assert found.when == "args.dtype == 'fp16'"


MANY = """
import torch


def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    if not args.table:
        raise SystemExit("no table")
    if args.names:
        if args.cells:
            if args.rows:
                if args.fp16:
                    for x in loader:
                        with torch.autocast("cuda", dtype=torch.float16):
                            loss = model(x).mean()
                        if args.logged:
                            print(loss)
                        loss.backward()
                        optimizer.step()
"""


def test_of_many_branches_those_that_ask_about_precision_are_named(tmp_path: Path):
    file = tmp_path / "train.py"
    file.write_text(MANY, encoding="utf-8")
    (found,) = check([str(file)], select=["fp16-without-scaler"], assume={}).findings
    assert found.when == "args.cells and args.rows and args.fp16"


TWO_SCALERS = """
import torch


def main(args, net, critic, loader):
    scaler = torch.amp.GradScaler("cuda")
    critic_scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.Adam(net.parameters())
    a_critic_optimizer = torch.optim.Adam(critic.parameters())
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        a_critic_optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = critic(x).mean()
        critic_scaler.scale(loss).backward()
        critic_scaler.step(a_critic_optimizer)
        critic_scaler.update()
        torch.save({"a": a_critic_optimizer.state_dict(), "b": optimizer.state_dict(), "net": net.state_dict()}, args.out)
"""


def test_a_checkpoint_names_an_optimizer_with_the_scaler_that_steps_it(tmp_path: Path):
    file = tmp_path / "train.py"
    file.write_text(TWO_SCALERS, encoding="utf-8")
    [finding] = check([str(file)], select=["scaler-not-checkpointed"], assume={}).findings
    assert any(
        f"holds '{optimizer}' but not '{scaler}'" in finding.message
        for optimizer, scaler in (("optimizer", "scaler"), ("a_critic_optimizer", "critic_scaler"))
    )


HALVED = """
import copy
import os

import torch

RANK = int(os.getenv("RANK", -1))


def main(args, model, average, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(args.epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    if RANK in {{-1, 0}}:
        if {also}:
            state = {{"model": copy.deepcopy(model).half(), "optimizer": optimizer.state_dict()}}
            torch.save(state, args.last)
            if args.fitness == args.best:
                torch.save(state, args.out)
"""


@pytest.mark.parametrize(
    ("also", "when"),
    [
        ("RANK == 0", ""),
        ("args.keep in ['all', 'last']", "args.keep in ['all', 'last']"),
        ("args.keep is not None", "args.keep is not None"),
    ],
)
def test_a_branch_over_a_list_is_told_as_it_is_written_and_that_of_a_rank_not_at_all(
    tmp_path: Path, also: str, when: str
):
    file = tmp_path / "train.py"
    file.write_text(HALVED.format(also=also), encoding="utf-8")
    [finding] = check([str(file)], select=["masters-lost-in-checkpoint"], assume={}).findings
    assert finding.when == when
    assert len({step.place for step in finding.trace}) == len(finding.trace)  # each place once


def test_what_is_asked_both_ways_is_no_condition():
    from precisionlint.checks.base import Hit, Seen
    from precisionlint.source.run import conditions

    trace = tuple(
        Seen(None, "", (label,))
        for label in (
            "args.tower is not None",
            "args.tower is None",
            "args.kind in ['a']",
            "args.kind not in ['a']",
            "args.amp",
        )
    )
    assert conditions(Hit("half-rope", None, "", trace)) == ["args.amp"]


GIVEN_BACK = """
import torch

HALF = ["fp16", "float16"]


def to_dtype(precision):
    if precision in HALF:
        return torch.float16
    if precision == "bf16":
        return torch.bfloat16
    return torch.float32


def main(args, model, loader):
    wanted = to_dtype(args.precision)
    model.to({cast})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("cast", "when"),
    [
        ("wanted", {"wanted == torch.bfloat16", "wanted == torch.float16"}),
        ("dtype=wanted", {"wanted == torch.bfloat16", "wanted == torch.float16"}),
        ("torch.bfloat16", {""}),
    ],
)
def test_weights_that_are_cast_to_what_a_function_gives_back_are_half_for_one_of_its_values(
    tmp_path: Path, cast: str, when: set[str]
):
    file = tmp_path / "train.py"
    file.write_text(GIVEN_BACK.format(cast=cast), encoding="utf-8")
    findings = check([str(file)], select=["master-weights"], assume={}).findings
    assert {each.when for each in findings} == when


SPELLED = """
import contextlib

import torch


def region(device, precision):
    wanted = {asked}
    if wanted == "bf16":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    if wanted == "fp16":
        return torch.autocast("cuda", dtype=torch.float16)
    return contextlib.nullcontext()


def epoch(model, loader, optimizer, scaler, device, precision):
    for x in loader:
        optimizer.zero_grad()
        with region(device, precision):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(cfg, model, loader, device):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled={given} == "{name}")
    epoch(model, loader, optimizer, scaler, device, {handed})
"""


@pytest.mark.parametrize(
    ("asked", "given", "handed"),
    [
        ("precision.lower()", "cfg.precision.lower()", "cfg.precision"),
        ("str(precision).lower()", "str(cfg.precision).lower()", "str(cfg.precision)"),
        ("precision.replace('-mixed', '')", "cfg.precision.replace('-mixed', '')", "cfg.precision"),
    ],
)
def test_a_setting_that_is_spelled_anew_is_the_same_wherever_it_is_asked(
    tmp_path: Path, asked: str, given: str, handed: str
):
    file = tmp_path / "train.py"
    for name, rules in (("fp16", []), ("bf16", ["scaler-with-bf16"])):
        file.write_text(SPELLED.format(asked=asked, given=given, handed=handed, name=name), encoding="utf-8")
        assert sorted(each.rule for each in check([str(file)], assume={}).findings) == rules
