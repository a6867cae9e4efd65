"""The audit's report as text: what an engineer reads of a model of 48 layers in a minute, on one screen."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import precisionlint
from precisionlint.audit_report import AuditReport, Judged, OpRecord, Station, UpdateRecord, Verdict
from precisionlint.findings import Finding, Place
from precisionlint.report.audit_text import render
from precisionlint.report.layout import table

BF16 = torch.bfloat16


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        exps = torch.exp(scores - scores.detach().amax(-1, keepdim=True).to(BF16))
        return self.out((exps / exps.sum(-1, keepdim=True)) @ v)  # <- the softmax


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def audited(layers: int) -> AuditReport:
    """A step in bf16 autocast with three faults."""
    torch.manual_seed(0)
    model = GPT(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 64, (2, 17))
    with precisionlint.audit(model, optimizer, name="gpt") as audit:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            logits = model(tokens[:, :-1])
            loss = functional.nll_loss(torch.log_softmax(logits, -1).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return audit.report


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return audited(48)


def test_a_model_of_48_layers_with_findings_fits_on_a_screen(report: AuditReport):
    page = list(render(report))
    assert len(page) <= 40 and max(map(len, page)) <= 120
    assert len(report.findings) == 3
    assert abs(len(page) - len(list(render(audited(2))))) <= 1  # it grows with kinds of modules, not with layers
    assert len(list(render(report, width=100))) <= 46


def test_the_page_has_the_verdict_first_then_findings_order_ops_storage_and_settings(report: AuditReport):
    page = list(render(report))
    assert page[0] == "audit of gpt: found 3 warnings"
    assert "warning softmax-in-half" in page[3]
    heads = [line.split()[0] for line in page[4:] if line[:1].isalpha() and not line.startswith("tests/")]
    assert heads[:6] == ["order", "ops", "casts", "storage", "gradients", "settings"]


def test_a_finding_is_told_with_its_line_its_modules_and_the_way_that_led_there(report: AuditReport):
    page = "\n".join(render(report))
    assert (
        "| return self.out((exps / exps.sum(-1, keepdim=True)) @ v)  # <- the softmax  (in layers.*.attn: 48 mod"
        in page
    )
    assert re.search(r"\n    seen: \S+:\d+ exp in bf16 > :\d+ their sum is stored in bf16 > :\d+ divided here\n", page)


def test_ops_are_counted_by_family_dtypes_and_phase_with_their_share_of_the_work(report: AuditReport):
    page = list(render(report))
    head = next(line for line in page if line.startswith("ops by family"))
    assert head.split() == [
        "ops",
        "by",
        "family",
        "in",
        "->",
        "sum",
        "->",
        "out",
        "fwd",
        "bwd",
        "clip",
        "optim",
        "FLOPs",
        "where",
    ]
    (products,) = [line for line in page if line.startswith("  matmul")]
    forward = sum(op.count for op in report.ops if op.family == "matmul" and op.phase == "forward")
    backward = sum(op.count for op in report.ops if op.family == "matmul" and op.phase == "backward")
    assert (forward, backward) == (48 * 6 + 1, 2 * (48 * 6 + 1))
    assert products.split() == [
        *("matmul", "bf16", "->", "fp32", "->", "bf16", str(forward), str(backward), "100%"),
        *("layers.*.attn,", "layers.*.mlp,", "head"),
    ]  # fmt: skip
    assert any(line.startswith("  exponential") and "! input bf16, fp32 due: layers.*.attn" in line for line in page)


def test_all_lists_every_finding_op_and_module_in_full(report: AuditReport):
    page = list(render(report, all=True))
    assert len(page) > 5000
    assert any("layers.31.attn.qkv" in line and " addmm " in f" {line} " for line in page)
    assert sum("^^^" in line for line in page) == 3


def told(**fields: object) -> AuditReport:
    empty: dict[str, object] = dict.fromkeys(
        (
            "findings",
            "ops",
            "order",
            "objects",
            "casts",
            "storage",
            "activations",
            "updates",
            "notes",
            "meaning",
            "regions",
        ),
        (),
    )
    empty.update(name="a step", gradients=None, settings={}, steps=1, complete=True)
    return AuditReport(**{**empty, **fields})  # type: ignore[arg-type]


def fault(line: int, rule: str = "softmax-in-half", severity: str = "warning", message: str = "as it is") -> Finding:
    return Finding(rule, "half-arithmetic", severity, "certain", message, Place("m.py", line, 1, line, 2))  # type: ignore[arg-type]


def test_the_gravest_finding_comes_first_and_the_same_fault_is_told_once_with_all_its_places():
    found = (
        fault(3),
        fault(9),
        fault(12, "clip-before-unscale", "error", "clips"),
        fault(40),
        fault(50, message="other"),
    )
    page = list(render(told(findings=found)))
    assert page[0] == "audit of a step: found 1 error, 4 warnings"
    assert page[2] == page[-1] == ""
    assert page[3:-1] == [
        "m.py:12:1: error clip-before-unscale: clips",
        "m.py:3:1: warning softmax-in-half: as it is",
        "    also at m.py:9, m.py:40",
        "m.py:50:1: warning softmax-in-half: other",
    ]
    full = list(render(told(findings=found), all=True))
    assert sum("softmax-in-half" in line for line in full) == 4


def test_what_repeats_in_the_order_is_told_once():
    micro = [Station("backward", Place("t.py", 4, 1, 4, 2)), Station("autocast left", Place("t.py", 3, 1, 3, 2))]
    stations = (
        *micro * 4,
        Station("steps", Place("o.py", 7, 1, 7, 2)),
        *[Station("zeroed", Place("o.py", 8, 1, 8, 2))] * 3,
    )
    page = list(render(told(order=stations)))
    assert page[3:] == ["order       (t.py:4 backward > :3 autocast left) 4 times > o.py:7 steps > :8 zeroed 3 times"]


@pytest.mark.parametrize("verdict", ["refuted", "not reached", "another configuration", "not measurable here"])
def test_what_check_read_is_told_with_what_the_run_says_of_it(verdict: Verdict):
    read = [Judged(fault(3), "confirmed"), Judged(fault(4, "half-ema"), "confirmed"), Judged(fault(5), verdict)]
    page = list(render(told(), read=read))
    assert page[3:] == [
        "check read  confirmed: softmax-in-half m.py:3; half-ema m.py:4",
        f"            {verdict}: softmax-in-half m.py:5",
    ]


def test_lost_updates_are_told_by_kinds_of_weights():
    lost = [UpdateRecord(f"layers.{number}.norm.weight", "bfloat16", 10, 9 + number % 2) for number in range(48)]
    page = list(render(told(updates=(*lost, UpdateRecord("head.weight", "bfloat16", 20, 0)))))
    assert page[3:] == [
        "updates     91.2% of 500 updates of half weights rounded away",
        "            layers.*.norm.weight  bf16  95.0% of 480",
        "            head.weight           bf16  0.0% of 20",
    ]
    full = list(render(told(updates=tuple(lost)), all=True))
    assert "            layers.7.norm.weight   bf16  100.0% of 10" in full


def test_dtypes_of_a_mixed_list_and_of_partial_sums_are_short():
    op = OpRecord(
        "mm",
        "forward",
        "a.b.c.d",
        None,
        ("bfloat16", "int64"),
        "float32, partly bfloat16",
        ("bfloat16",),
        2,
        8,
        family="matmul",
    )
    page = list(render(told(ops=(op,))))
    assert page[4].split() == ["matmul", "bf16", "->", "fp32,", "partly", "bf16", "->", "bf16", "2", "100%", "a.b"]


def test_nothing_of_the_program_reaches_the_terminal_as_a_command():
    evil = "\x1b[2Jevil"
    place = Place(f"{evil}.py", 1, 1, 1, 2)
    found = Finding(evil, evil, "error", "certain", evil, place)
    op = OpRecord(evil, "forward", evil, place, ("float32",), "", ("float32",), 1, family=evil)
    page = render(
        told(findings=(found, found), ops=(op,), order=(Station(evil, place),), notes=(evil,), name=evil, error=evil)
    )
    assert not any("\x1b" in line for line in page)
    styled = render(told(findings=(found,), ops=(op,), notes=(evil,), name=evil, error=evil), color=True, all=True)
    assert not any("\x1b" in CODES.sub("", line) for line in styled)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


CODES = re.compile(r"\x1b\[[\d;]*m")


def test_colours_are_on_a_terminal_alone_and_change_no_character(report: AuditReport, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    page = list(render(report))
    for all in (False, True):
        styled = list(render(report, color=True, all=all))
        assert [CODES.sub("", line) for line in styled] == list(render(report, all=all))
        assert any("\x1b[1;33mwarning\x1b[0m" in line for line in styled)
    terminal = Terminal()
    report.print(file=terminal)
    assert CODES.search(terminal.getvalue()) and CODES.sub("", terminal.getvalue()).splitlines() == page
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as quiet:
            quiet.setenv(name, value)
            terminal = Terminal()
            report.print(file=terminal)
            assert terminal.getvalue().splitlines() == page
    monkeypatch.setenv("FORCE_COLOR", "1")  # a pipe is one whatever a variable says
    pipe = io.StringIO()
    report.print(file=pipe)
    assert pipe.getvalue().splitlines() == page


def test_widths_count_the_cells_of_a_terminal():
    from rich.cells import cell_len

    wide = "\u6ce8\u610f\u529b"  # three characters in six cells
    ops = [
        OpRecord("mm", "forward", name, None, ("float32",), "float32", (kind,), 1, 8, family=f"f{number}", verdict=wide)
        for number, (name, kind) in enumerate([(f"{wide}.{'x' * 200}", "float32"), ("narrow", "bfloat16")])
    ]
    page = list(render(told(ops=tuple(ops), notes=(" ".join([wide] * 60),))))
    assert all(cell_len(line) <= 120 for line in page)
    assert any(line.endswith("\u2026") for line in page)
    casts = list(table([(wide, "1"), ("narrow", "2")]))
    assert [cell_len(line[: line.index(end)]) for line, end in zip(casts, "12", strict=True)] == [8, 8]


def test_a_stream_that_is_no_terminal_gets_the_width_of_a_pipe(report: AuditReport, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "90")
    pipe = io.StringIO()
    report.print(file=pipe)
    assert pipe.getvalue().splitlines() == list(render(report, width=120))

    terminal = Terminal()
    report.print(file=terminal)
    assert terminal.getvalue().splitlines() == list(render(report, width=90, color=True))
