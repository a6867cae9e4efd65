"""`precisionlint audit` runs a script unchanged, audits the iteration that was asked for, and tells findings from
failures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from precisionlint.cli import main

TRAINER = """\
import argparse
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--unscale", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=args.fp16)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
for step in range(args.steps):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=args.fp16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if args.unscale:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print("trained step", step + 1, __name__, sys.argv[1:])
print("the script's end")
"""
CLIP_LINE = TRAINER[: TRAINER.index("    clip_grad_norm_")].count("\n") + 1


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Audit(Protocol):
    def __call__(self, source: str, *arguments: str, options: tuple[str, ...] = ()) -> Ran: ...


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Audit:
    """Runs the command on a script in this process, whose torch is imported already."""
    monkeypatch.chdir(tmp_path)

    def run(source: str, *arguments: str, options: tuple[str, ...] = ()) -> Ran:
        (tmp_path / "train.py").write_text(source)
        code = main(["audit", *options, "train.py", *arguments])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


def test_a_fault_is_measured_in_the_second_step_and_confirms_what_check_read(audit: Audit):
    ran = audit(TRAINER, "--fp16", options=("--format", "json"))
    assert ran.code == 1
    assert [(each["rule"], each["path"], each["line"]) for each in ran.json["report"]["findings"]] == [
        ("clip-before-unscale", "train.py", CLIP_LINE)
    ]
    assert [(each["rule"], each["line"], each["verdict"]) for each in ran.json["read"]] == [
        ("clip-before-unscale", CLIP_LINE, "confirmed")
    ]
    assert ran.json["steps"] == 2 and ran.json["report"]["complete"]
    assert ran.err.splitlines() == [f"trained step {step} __main__ ['--fp16']" for step in (1, 2)]


def verdicts(ran: Ran) -> list[tuple[str, int, str]]:
    return [(each["rule"], each["line"], each["verdict"]) for each in ran.json["read"]]


JSON = ("--format", "json")


def test_a_reading_of_another_configuration_is_told_apart_from_one_that_the_run_refutes(audit: Audit):
    ran = audit(TRAINER, "--fp16", "--unscale", options=JSON)
    assert ran.json["report"]["findings"] == []
    assert verdicts(ran) == [("clip-before-unscale", CLIP_LINE, "another configuration")]
    plain = audit(TRAINER, options=JSON)
    assert plain.json["report"]["ok"]
    assert [station["what"] for station in plain.json["report"]["order"]].count("'optimizer' steps") == 1
    assert verdicts(plain) == [("clip-before-unscale", CLIP_LINE, "another configuration")]


def test_a_reading_is_refuted_where_the_run_came_through_all_its_stations_without_the_fault(audit: Audit):
    source = TRAINER.replace("if args.unscale:", "if len(model) > 1:")
    ran = audit(source, "--fp16", options=JSON)
    assert verdicts(ran) == [("clip-before-unscale", CLIP_LINE, "refuted")]
    assert (ran.code, ran.json["report"]["findings"]) == (0, [])


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


def test_what_only_a_whole_run_shows_is_not_measurable_in_one_step(audit: Audit):
    source = TRAINER + 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")\n'
    ran = audit(source, "--fp16", "--unscale", options=JSON)
    assert ("scaler-not-checkpointed", source.count("\n"), "not measurable here") in verdicts(ran)


def test_the_names_that_a_configuration_hangs_on_are_those_of_branches_that_no_loop_changes(tmp_path: Path):
    from precisionlint.audit_command import configuration_names

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


def test_values_of_names_are_looked_up_without_running_anything():
    from precisionlint.trace.configuration import values

    class Settings:
        of_class = 3

        @property
        def counted(self) -> bool:
            raise AssertionError("run")

        def __getattr__(self, name: str) -> object:
            raise AssertionError("run")

    args, settings = argparse.Namespace(fp16=True, kind="bf16", odd=[1]), Settings()

    def inner() -> dict[str, object]:
        names = ("args.fp16", "args.kind", "args.odd", "args.no", "settings.counted", "settings.of_class", "nowhere.x")
        return values((*names, "json.loads", "JSON"), sys._getframe())

    assert inner() == {"args.fp16": True, "args.kind": "bf16", "settings.of_class": 3}
    assert (args, settings) is not None


def test_a_step_that_never_comes_is_said_plainly_and_is_no_finding(audit: Audit):
    ran = audit(TRAINER, "--steps", "1")
    assert ran.code == 3
    assert "step 2 never came" in ran.out
    assert "the script's end" in ran.err


def test_the_script_goes_on_when_it_is_asked_to(audit: Audit):
    ran = audit(TRAINER, "--fp16", options=("--keep-running", "--step", "3"))
    assert "audit of train.py, step 3: found 1 error" in ran.out
    assert "trained step 4" in ran.err and "the script's end" in ran.err
    assert "train.py ended by itself" in ran.out


def test_an_exception_of_the_script_is_told_apart_from_findings(audit: Audit):
    source = TRAINER.replace("    scaler.update()\n", "    scaler.update()\n    raise OSError('disk full')\n")
    ran = audit(source, "--fp16", options=("--step", "1"))
    assert ran.code == 3
    assert "train.py raised OSError: disk full" in ran.out
    assert "clip-before-unscale" in ran.out  # what was seen up to it stands
    assert "OSError: disk full" in ran.err and "script.py" not in ran.err


def test_the_scripts_own_exit_code_is_told(audit: Audit):
    ran = audit("import sys\nsys.exit(7)\n")
    assert ran.code == 3 and "ended with exit code 7" in ran.out


def test_a_step_that_the_scaler_skips_counts(audit: Audit):
    source = TRAINER.replace("scaler.scale(loss).backward()", "scaler.scale(loss * float('inf')).backward()")
    ran = audit(source, "--fp16", "--unscale", options=("--format", "json"))
    assert ran.json["report"]["steps"] == 1
    assert not any(op["phase"] == "optimizer" for op in ran.json["report"]["ops"])


def test_the_report_goes_to_a_file_and_nothing_to_standard_output(audit: Audit, tmp_path: Path):
    ran = audit(TRAINER, "--fp16", options=("--out", "report.txt"))
    assert ran.code == 1 and ran.out == ""
    assert (tmp_path / "report.txt").read_text().startswith("audit of train.py, step 2: found 1 error")


def test_a_file_that_cannot_be_written_is_told_before_the_script_runs(audit: Audit):
    ran = audit("print('ran')\n", options=("--out", "nowhere/report.txt"))
    assert ran.code == 2 and "nowhere/report.txt: cannot be written: No such file or directory" in ran.err
    assert "ran\n" not in ran.err


@pytest.mark.parametrize("folder", ["elsewhere", ".."])
def test_a_script_that_goes_elsewhere_is_told_by_the_paths_of_where_it_was_started(
    audit: Audit, tmp_path: Path, folder: str
):
    (tmp_path / "elsewhere").mkdir()
    source = TRAINER.replace("import torch\n", f"import os\nimport torch\nos.chdir({folder!r})\n", 1)
    ran = audit(source, "--fp16", options=(*JSON, "--out", "report.json"))
    outcome = json.loads((tmp_path / "report.json").read_text())
    assert (ran.code, Path.cwd()) == (1, tmp_path)
    assert [each["path"] for each in outcome["report"]["findings"]] == ["train.py"]
    assert [each["verdict"] for each in outcome["read"]] == ["confirmed"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('at once')\n", "raised RuntimeError: at once"),
        ("def broken(:\n", "raised SyntaxError"),
        ("import sys\nsys.exit('no data')\n", "ended with exit code 1"),
        ("print('no training at all')\n", "ended by itself"),
        ("import torch\ntorch.ones(2).sum()\n", "ended by itself"),
    ],
)
def test_a_script_that_never_steps_is_told_in_a_line_with_how_it_ended(audit: Audit, source: str, said: str):
    ran = audit(source)
    first = ran.out.splitlines()[0]
    assert ran.code == 3 and "Traceback" not in ran.out
    assert first.startswith("audit of train.py: step 2 never came: train.py ") and said in first


def test_a_module_runs_with_m(tmp_path: Path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__main__.py").write_text(TRAINER)
    command = [sys.executable, "-m", "precisionlint", "audit", "--format", "json", "-m", "trainer", "--fp16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    outcome = json.loads(done.stdout)
    assert (done.returncode, [each["rule"] for each in outcome["report"]["findings"]]) == (1, ["clip-before-unscale"])
    assert [each["verdict"] for each in outcome["read"]] == ["confirmed"]


AROUND = """\
import torch
from torch import nn

model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
with torch.autocast("cpu", dtype=torch.bfloat16):
    for step in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_a_region_around_the_loop_is_found_at_its_with_although_it_was_entered_before_the_window(audit: Audit):
    ran = audit(AROUND, options=("--format", "json"))
    found = [(each["rule"], each["line"]) for each in ran.json["report"]["findings"]]
    assert found == [("autocast-around-training-loop", 7)]


GAN = """\
import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(for_generator, 1)
for step in range(4):
    for_critic.zero_grad()
    critic(generator(torch.randn(16, 4)).detach()).mean().backward()
    for_critic.step()
    for_generator.zero_grad()
    (-critic(generator(torch.randn(16, 4))).mean()).backward()
    for_generator.step()
    schedule.step()
"""


def test_an_iteration_with_two_optimizers_holds_both_from_its_first_forward(audit: Audit):
    ran = audit(GAN, options=("--format", "json"))
    steps = [station["what"] for station in ran.json["report"]["order"] if "steps" in station["what"]]
    assert steps == ["'for_critic' steps", "'for_generator' steps"]
    assert ran.json["report"]["findings"] == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        ([], "audit needs a script"),
        (["--step", "0", "x.py"], "is not the number of a step"),
    ],
)
def test_wrong_usage_is_told_in_a_line(arguments: list[str], what: str, capfd: pytest.CaptureFixture[str]):
    try:
        code = main(["audit", *arguments])
    except SystemExit as exit_:  # argparse's own
        code = int(exit_.code or 0)
    assert code == 2 and what in capfd.readouterr().err


def test_a_wrong_policy_table_is_told_before_the_script_runs(audit: Audit, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("[tool.precisionlint.policy]\nsoftmax = 3\n")
    ran = audit("print('ran')\n")
    assert ran.code == 2 and "pyproject.toml:2: policy: 'softmax' is no table" in ran.err
    assert "ran\n" not in ran.err


def test_a_comment_silences_a_measured_finding_as_it_does_a_read_one_and_its_reason_is_told(audit: Audit):
    comment = "  # precisionlint: ignore[clip-before-unscale] measured on purpose"
    source = TRAINER.replace("model.parameters(), 1.0)", f"model.parameters(), 1.0){comment}")
    ran = audit(source, "--fp16", options=JSON)
    assert (ran.code, ran.json["report"]["findings"], ran.json["read"]) == (0, [], [])
    assert [(each["rule"], each["reason"]) for each in ran.json["report"]["suppressed"]] == [
        ("clip-before-unscale", "measured on purpose")
    ]
    text = audit(source, "--fp16").out
    assert f"train.py:{CLIP_LINE}:5: comment: clip-before-unscale: measured on purpose" in text


@pytest.mark.parametrize(
    ("table", "code", "severities"),
    [
        ('ignore = ["clip-before-unscale"]', 0, []),
        ('select = ["autocast"]', 0, []),
        ('[tool.precisionlint.per-file-ignores]\n"train.py" = ["loss-scaling"]', 0, []),
        ('[tool.precisionlint.severity]\nclip-before-unscale = "info"', 0, ["info"]),
        ("", 1, ["error"]),
    ],
)
def test_measured_findings_follow_the_projects_settings(
    audit: Audit, tmp_path: Path, table: str, code: int, severities: list[str]
):
    (tmp_path / "pyproject.toml").write_text(f"[tool.precisionlint]\n{table}\n")
    ran = audit(TRAINER, "--fp16", options=JSON)
    assert [each["severity"] for each in ran.json["report"]["findings"]] == severities
    assert ran.code == code


def test_settings_that_cannot_be_used_are_told_before_the_script_runs(audit: Audit, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("[tool.precisionlint]\nnonsense = 1\n")
    ran = audit("print('ran')\n")
    assert ran.code == 2 and "pyproject.toml:2" in ran.err and "nonsense" in ran.err
    assert "ran\n" not in ran.err


def test_a_script_leaves_nothing_behind(audit: Audit):
    before = sys.argv, sys.path[:], sys.modules["__main__"], torch.nn.Module.__call__, torch.optim.Optimizer.__init__
    assert audit(TRAINER, "--fp16").code == 1
    after = sys.argv, sys.path[:], sys.modules["__main__"], torch.nn.Module.__call__, torch.optim.Optimizer.__init__
    assert after == before


PROJECTS = Path(__file__).parents[1] / "fixtures" / "projects"


def test_a_project_of_several_files_is_audited_as_it_stands(tmp_path: Path):
    shutil.copytree(PROJECTS / "digits", tmp_path / "digits")
    command = [sys.executable, "-m", "precisionlint", "audit", "--format", "json", "train.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path / "digits", capture_output=True, text=True, check=False)
    outcome = json.loads(done.stdout)
    found = [(each["rule"], each["path"]) for each in outcome["report"]["findings"]]
    assert found == [("clip-before-unscale", "utils.py")]
    assert outcome["ended"] == "stopped after the audited step"
