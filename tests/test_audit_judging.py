"""What a run says of the findings that ``check`` read before it."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_scripts import CLIP_LINE, JSON, TRAINER, Audit, Ran
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from precisionlint.audit_judging import configuration_names, judge
from precisionlint.audit_report import AuditReport, Judged
from precisionlint.findings import Finding, Place, Step
from precisionlint.trace.configuration import values


def verdicts(ran: Ran) -> list[tuple[str, int, str]]:
    return [(each["rule"], each["line"], each["verdict"]) for each in ran.json["read"]]


def test_a_reading_of_another_configuration_is_told_apart_from_one_that_the_run_refutes(audit: Audit):
    ran = audit(TRAINER, "--fp16", "--unscale", options=JSON)
    assert ran.json["report"]["findings"] == []
    assert verdicts(ran) == [("clip-before-unscale", CLIP_LINE, "another configuration")]
    plain = audit(TRAINER, options=JSON)
    assert plain.json["report"]["ok"]
    assert [station["what"] for station in plain.json["report"]["order"]].count("'optimizer' steps") == 1
    assert verdicts(plain) == [("clip-before-unscale", CLIP_LINE, "another configuration")]


def test_a_reading_is_not_refuted_where_it_hangs_on_a_branch_that_nobody_can_evaluate(audit: Audit):
    source = TRAINER.replace("if args.unscale:", "if len(model) > 1:")
    ran = audit(source, "--fp16", options=JSON)
    assert verdicts(ran) == [("clip-before-unscale", CLIP_LINE, "not measurable here")]
    assert ran.json["read"][0]["why"].endswith("whether 'len(Sequential) <= 1' holds here is not known")
    assert (ran.code, ran.json["report"]["findings"]) == (0, [])  # nothing of it is true of this run


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other device is there")
def test_a_finding_of_either_device_is_one_of_this_machines_too(audit: Audit):
    source = TRAINER.replace("torch.manual_seed(0)\n", 'device = "cuda" if torch.cuda.is_available() else "cpu"\n')
    source = source.replace('"cpu", ', "device, ").replace("if args.unscale:", "if len(model) > 1:")
    (read,) = audit(source, "--fp16", options=JSON).json["read"]
    assert (read["verdict"], read["line"]) == ("not measurable here", CLIP_LINE), read["why"]
    assert "is_available" not in read["why"] and "len(" in read["why"]
    only = source.replace("    if len(model) > 1:", '    if len(model) > 1 or device == "cpu":')
    (read,) = audit(only, "--fp16", options=JSON).json["read"]
    assert (read["verdict"], read["why"]) == ("another configuration", "torch.cuda.is_available() is False")


TWO_CLIPS = TRAINER.replace(
    "    clip_grad_norm_(model.parameters(), 1.0)\n",
    "    if len(model) > 5:\n"
    "        clip_grad_norm_(model.parameters(), 1.0)\n"
    "    else:\n"
    "        clip_grad_norm_(model.parameters(), 2.0)\n",
)


def test_of_two_faults_of_one_rule_only_the_one_that_ran_is_confirmed(audit: Audit):
    ran = audit(TWO_CLIPS, "--fp16", options=JSON)
    first = TWO_CLIPS[: TWO_CLIPS.index("        clip_grad_norm_")].count("\n") + 1
    assert verdicts(ran) == [
        ("clip-before-unscale", first, "not reached"),
        ("clip-before-unscale", first + 2, "confirmed"),
    ]


ONE_LINE = TRAINER.replace(
    "    clip_grad_norm_(model.parameters(), 1.0)\n",
    "    clip_grad_norm_(model.parameters(), 1.0) if len(model) > 5 else clip_grad_norm_(model.parameters(), 2.0)\n",
)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no columns of a call")
def test_two_calls_on_one_line_are_two(audit: Audit):
    ran = audit(ONE_LINE, "--fp16", options=JSON)
    assert [verdict for _, _, verdict in verdicts(ran)] == ["not reached", "confirmed"]


CAST = """\
import torch
from torch import nn

model = nn.Linear(8, 4).to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
"""


def test_a_fault_of_weights_is_confirmed_where_they_were_cast_long_before_the_window(audit: Audit):
    ran = audit(CAST, options=JSON)
    assert verdicts(ran) == [("bf16-only-weights", 4, "confirmed")]
    made = {station["what"]: station["place"]["line"] for station in ran.json["report"]["objects"]}
    assert made == {"weights take bfloat16": 4, "'optimizer' made (torch.optim.SGD)": 5}


SOFTMAX = """\
import torch
from torch import nn

model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        exps = torch.exp(logits - logits.max(-1, keepdim=True).values)
        probabilities = exps / exps.sum(-1, keepdim=True)
    loss = -probabilities.float()[torch.arange(16), y].log().mean()
    loss.backward()
    optimizer.step()
"""


def test_a_fault_of_arithmetic_is_confirmed_by_its_line(audit: Audit):
    assert verdicts(audit(SOFTMAX, options=JSON)) == [("softmax-in-half", 12, "confirmed")]


SAVED = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")\n'


def test_what_only_a_whole_run_shows_is_not_measurable_in_one_step(audit: Audit):
    source = TRAINER + SAVED
    ran = audit(source, "--fp16", "--unscale", options=JSON)
    assert ("scaler-not-checkpointed", source.count("\n"), "not measurable here") in verdicts(ran)


AROUND = """\
import torch
from torch import nn

model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))


def unused(model, optimizer):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).square().mean().backward()
    optimizer.step()


with torch.autocast("cpu", dtype=torch.bfloat16):
    for step in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_a_region_that_spans_steps_confirms_nothing_of_another_region(audit: Audit):
    ran = audit(AROUND, options=JSON)
    assert verdicts(ran) == [
        ("backward-under-autocast", 11, "not reached"),
        ("autocast-around-training-loop", 18, "confirmed"),
    ]


def test_a_backward_in_another_region_than_the_one_that_spans_steps_is_a_fault_of_its_own(audit: Audit):
    inner = AROUND.replace("    optimizer.step()\n\n\n", "\n\n").replace(
        "        optimizer.step()", "        unused(model, optimizer)\n        optimizer.step()"
    )
    found = [(each["rule"], each["line"]) for each in audit(inner, options=JSON).json["report"]["findings"]]
    assert found == [("backward-under-autocast", 11), ("autocast-around-training-loop", 14)]


@pytest.mark.parametrize(
    ("source", "arguments", "code"),
    [
        (TRAINER, ("--fp16",), 1),
        (TRAINER, ("--fp16", "--unscale"), 0),  # another configuration
        (TRAINER.replace("if args.unscale:", "if len(model) > 1:"), ("--fp16",), 0),  # measured to be sound
        (TRAINER.replace("    clip_grad_norm_(", "    if len(model) > 5:\n        clip_grad_norm_("), ("--fp16",), 0),
        (TRAINER + SAVED, ("--fp16", "--unscale"), 1),  # of the whole run, which no step contradicts
        (TRAINER + SAVED, ("--unscale",), 0),
    ],
)
def test_the_exit_code_tells_of_this_run_alone(audit: Audit, source: str, arguments: tuple[str, ...], code: int):
    assert audit(source, *arguments).code == code


# -- the configuration of a run


def test_the_names_that_a_configuration_hangs_on_are_those_of_branches_that_no_loop_changes(tmp_path: Path):
    source = """
for step in range(3):
    scale = 2
    if step % args.every == 0 or scale > 1 or not use_amp or f(args.deep.er):
        pass
half = args.half if args.choice == "x" else None
with autocast(enabled=self.amp):
    pass
"""
    (tmp_path / "train.py").write_text(source)
    found = configuration_names(str(tmp_path / "train.py"))
    assert found == {"args.every", "use_amp", "f", "args.deep.er", "args.choice", "self.amp"}
    (tmp_path / "train.py").write_text("if")
    assert configuration_names(str(tmp_path / "train.py")) == set()


DECIDED_ELSEWHERE = TRAINER.replace(
    "    if args.unscale:\n        scaler.unscale_(optimizer)\n", "    divider.divide(scaler, optimizer)\n"
).replace(
    "args = parser.parse_args()\n",
    """\
args = parser.parse_args()
yes, one = json.loads('[true, 1]')


@dataclasses.dataclass(slots=True)
class Slots:
    unscale: bool = yes


class Asking:
    def __init__(self):
        self.inner = {"unscale": yes}

    def __getattr__(self, name):
        return self.inner[name]

    @property
    def divides(self):
        return self.inner["unscale"]


class Divider:
    unscale = yes

    def __init__(self):
        self.settings = SETTINGS

    def divide(self, scaler, optimizer):
        if self.CONDITION:
            scaler.unscale_(optimizer)


divider = Divider()
""",
)


@pytest.mark.parametrize(
    ("settings", "condition", "known"),
    [
        ("None", "unscale", "self.unscale is True"),
        ("argparse.Namespace(unscale=yes)", "settings.unscale", "self.settings.unscale is True"),
        ("Slots()", "settings.unscale", "self.settings.unscale is True"),
        ("{'amp': {'unscale': one}}", "settings['amp']['unscale']", "self.settings['amp']['unscale'] is 1"),
        ('json.loads(\'{"how": "16"}\')', "settings.get('how') == '16'", "self.settings.get('how') is '16'"),
        ("Asking()", "settings.unscale", ""),
        ("Asking()", "settings.divides", ""),
        ("[yes]", "settings[0]", ""),
    ],
)
def test_settings_that_lie_in_objects_decide_and_those_that_an_object_computes_leave_it_open(
    audit: Audit, settings: str, condition: str, known: str
):
    source = DECIDED_ELSEWHERE.replace("SETTINGS", settings).replace("CONDITION", condition)
    ran = audit("import dataclasses, json\n" + source, "--fp16", options=JSON)
    (read,) = ran.json["read"]
    assert read["verdict"] == ("another configuration" if known else "not measurable here"), read
    assert read["why"] == known if known else f"self.{condition}" in read["why"], read["why"]
    assert ran.code == 0


class Settings:
    of_class = 3

    @property
    def counted(self) -> bool:
        raise AssertionError("run")

    def __getattr__(self, name: str) -> object:
        raise AssertionError("run")

    def inner(self, path: str, *names: str) -> dict[str, object]:
        return values({path: names}, sys._getframe())


def test_values_of_names_are_looked_up_without_running_anything():
    args, settings = argparse.Namespace(fp16=True, kind="bf16", odd=[1]), Settings()
    names = ("args.fp16", "args.kind", "args.odd", "args.no", "settings.counted", "settings.of_class", "nowhere.x")
    found = settings.inner(__file__, *names, "json.loads", "JSON")
    assert found == {"args.fp16": True, "args.kind": "bf16", "settings.of_class": 3}
    assert args is not None


def test_self_is_that_of_the_file_that_asks_and_no_other():
    settings = Settings()
    assert settings.inner(__file__, "self.of_class") == {"self.of_class": 3}
    assert settings.inner("elsewhere.py", "self.of_class") == {}


def test_names_are_found_among_the_globals_of_the_file_that_asks_and_two_values_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    for name, amp in (("first_settings", True), ("second_settings", False)):
        (tmp_path / f"{name}.py").write_text(f"use_amp = {amp}\nlevel_of_{name} = 2\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        __import__(name)
    asked = {
        str(tmp_path / f"{name}_settings.py"): {"use_amp", f"level_of_{name}_settings"} for name in ("first", "second")
    }
    assert values(asked, None) == {"level_of_first_settings": 2, "level_of_second_settings": 2}


STEP = """\
import torch
from torch.nn.utils import clip_grad_norm_


def step(model, optimizer, scaler, loss, cfg):
    scaler.scale(loss).backward()
    if cfg.unscale:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
OF_TWO_FILES = TRAINER.replace("import argparse\n", "import argparse\nimport steps\n").replace(
    TRAINER[TRAINER.index("    scaler.scale") : TRAINER.index("    print(")],
    "    steps.step(model, optimizer, scaler, loss, args)\n",
)


def test_a_configuration_that_another_file_hangs_on_is_the_runs_own_too(audit: Audit, tmp_path: Path):
    (tmp_path / "steps.py").write_text(STEP)
    line = STEP[: STEP.index("    clip_grad_norm_(")].count("\n") + 1
    ran = audit(OF_TWO_FILES, "--fp16", "--unscale", options=JSON)
    assert verdicts(ran) == [("clip-before-unscale", line, "another configuration")]
    assert [each["path"] for each in ran.json["read"]] == ["steps.py"]
    assert verdicts(audit(OF_TWO_FILES, "--fp16", options=JSON)) == [("clip-before-unscale", line, "confirmed")]


# -- arithmetic

NORM = """\
import sys

import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        x = x.to(torch.bfloat16) if len(sys.argv) > 1 else x
        half = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return half.float()


def unused(x):
    x = x.to(torch.bfloat16)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


model = nn.Sequential(nn.Linear(8, 8), Norm(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
for step in range(4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
NORM_LINE = NORM[: NORM.index("        half = ")].count("\n") + 1


def finding(rule: str, line: int, family: str = "half-arithmetic") -> Finding:
    return Finding(rule, family, "warning", "certain", "", Place("train.py", line, 16, line, 40))


def measured(audit: Audit, source: str, *arguments: str, options: tuple[str, ...] = ()) -> AuditReport:
    """The report of a run as ``judge`` takes it."""
    from precisionlint import audit_command

    outcome: list[AuditReport] = []

    def kept(*args: Any, **kwargs: Any) -> audit_command.Audited:
        audited = run(*args, **kwargs)
        assert audited.report is not None
        outcome.append(audited.report)
        return audited

    run, audit_command.run = audit_command.run, kept  # type: ignore[assignment]
    try:
        audit(source, *arguments, options=options)
    finally:
        audit_command.run = run
    return outcome[0]


def judged(finding: Finding, report: AuditReport) -> Judged:
    """What the run says of a finding that is read under its own configuration as well."""
    return judge(finding, report, finding)


WIDE = NORM.replace("x.to(torch.bfloat16) if len(sys.argv) > 1 else x", "x.float()").replace(
    "    nn.functional.cross_entropy(model(x), y).backward()",
    '    with torch.autocast("cpu", dtype=torch.bfloat16):\n'
    "        loss = nn.functional.cross_entropy(model(x), y)\n"
    "    loss.backward()",
)


def test_a_reading_of_arithmetic_is_refuted_where_its_line_ran_and_nothing_there_was_half(audit: Audit):
    report = measured(audit, WIDE)
    refuted = judged(finding("norm-without-upcast", NORM_LINE), report)
    assert refuted.verdict == "refuted" and refuted.why.endswith("ops there, all in float32")
    assert judged(finding("norm-without-upcast", NORM_LINE + 6), report).verdict == "not reached"  # nobody calls it
    assert judged(finding("norm-without-upcast", NORM_LINE, "fp8"), report).verdict == "not measurable here"
    assert judge(finding("norm-without-upcast", NORM_LINE), report, None).verdict == "another configuration"


def test_a_step_that_computes_nothing_in_half_refutes_no_reading_of_half_arithmetic(audit: Audit):
    other = judged(finding("norm-without-upcast", NORM_LINE), measured(audit, NORM))
    assert (other.verdict, other.why) == ("another configuration", "nothing in this step is in half precision")
    bf16 = judged(finding("epsilon-underflow", NORM_LINE), measured(audit, NORM, "half"))
    assert (bf16.verdict, bf16.why) == ("another configuration", "nothing in this step is in fp16")


def test_a_reading_of_arithmetic_is_not_refuted_where_a_branch_there_casts(audit: Audit):
    branching = WIDE.replace("x = x.float()", "x = x.float() if x.dim() > 1 else x")
    here = judged(finding("norm-without-upcast", NORM_LINE), measured(audit, branching))
    said = "the step shows no fault, but whether 'x.dim() > 1' holds here is not known"
    assert (here.verdict, here.why, here.stands) == ("not measurable here", said, False)
    masking = WIDE.replace("x = x.float()", "x = x.float()\n        x = x + 1 if x.dim() > 3 else x")
    assert judged(finding("norm-without-upcast", NORM_LINE + 1), measured(audit, masking)).verdict == "refuted"


def test_a_reading_of_arithmetic_is_not_refuted_where_half_numbers_met_its_line(audit: Audit):
    report = measured(audit, NORM, "half")
    assert judged(finding("norm-without-upcast", NORM_LINE), report).verdict == "confirmed"
    other = judged(finding("softmax-in-half", NORM_LINE), report)
    assert (other.verdict, other.why) == ("not measurable here", "bfloat16 met its ops, and one step shows no fault")


def test_where_the_lines_of_a_finding_only_call_what_computes_those_of_its_way_are_asked(audit: Audit):
    report = measured(audit, WIDE)
    there = finding("norm-without-upcast", NORM_LINE)
    caller = NORM[: NORM.index("class Norm")].count("\n") + 1  # a line without ops
    through = replace(there, place=replace(there.place, line=caller, end_line=caller), trace=(Step(there.place, ""),))
    assert judged(through, report).verdict == "refuted"


COMPILES = hasattr(TorchDispatchMode, "ignore_compile_internals")
COMPILE = ("x, y = ", "model = torch.compile(model)\nx, y = ")
COMPILED = WIDE.replace(*COMPILE)


@pytest.mark.skipif(shutil.which("g++") is None or not COMPILES, reason="inductor needs a compiler and a new torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
def test_what_ran_compiled_refutes_nothing_and_is_seen_when_it_is_run_uncompiled(audit: Audit):
    there = finding("norm-without-upcast", NORM_LINE)
    compiled = judged(there, measured(audit, COMPILED))
    assert (compiled.verdict, compiled.why) == ("not measurable here", "what ran compiled is not seen")
    assert judged(there, measured(audit, COMPILED, options=("--eager",))).verdict == "refuted"
    assert judged(there, measured(audit, NORM.replace(*COMPILE), "half", options=("--eager",))).verdict == "confirmed"


# -- devices that are not there

FOR_CUDA = TRAINER.replace('"cpu"', '"cuda"')


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*")
def test_a_machine_without_the_device_of_regions_and_scalers_refutes_nothing_and_says_so(audit: Audit):
    source = FOR_CUDA.replace("if args.unscale:", "if len(model) > 5:")
    ran = audit(source, "--fp16", options=JSON)
    assert verdicts(ran) == [("clip-before-unscale", CLIP_LINE, "not measurable here")]
    assert ran.json["read"][0]["why"] == "this machine has no cuda"
    assert ran.json["report"]["absent"] == ["cuda"]
    text = audit(source, "--fp16")
    assert text.out.splitlines()[0].endswith("found nothing, but this machine has no cuda (see notes)")
    made = source[: source.index("scaler = ")].count("\n") + 1
    assert f"notes       this machine has no cuda: what was made for it at train.py:{made} is off" in text.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_what_the_program_itself_switches_off_is_no_missing_device(audit: Audit):
    ran = audit(FOR_CUDA, options=JSON)
    assert ran.json["report"]["absent"] == []
