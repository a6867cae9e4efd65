"""`precisionlint audit` runs a script unchanged, audits the iteration that was asked for, and tells findings from
failures.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from audit_scripts import CLIP_LINE, JSON, TRAINER, Audit

from precisionlint.cli import main


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


def test_a_region_is_left_on_its_with_also_where_it_was_entered_before_the_window(audit: Audit):
    ran = audit(TRAINER, "--fp16", options=JSON)
    line = TRAINER[: TRAINER.index("    with torch.autocast")].count("\n") + 1
    regions = [each["place"]["line"] for each in ran.json["report"]["order"] if "autocast" in each["what"]]
    assert regions == [line] * 3  # entered, left, and entered again by the next iteration


def test_a_step_that_never_comes_is_said_plainly_and_is_no_finding(audit: Audit):
    ran = audit(TRAINER, "--steps", "1")
    assert ran.code == 3
    assert "step 2 never came: train.py ended by itself after 1 step; --step 1 audits" in ran.out
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
    assert ran.out.startswith("audit of train.py, step 1: found 1 error, but the step raised\n")
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
        (
            "import torch\nw = torch.ones(2, requires_grad=True)\nfor _ in range(3):\n    w.sum().backward()\n",
            "after 0 steps of torch.optim's optimizers, though a backward ran 3 times",
        ),
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


def test_a_modules_packages_are_imported_with_the_script_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "printing").mkdir()
    (tmp_path / "printing" / "__init__.py").write_text("print('imported')\n")
    (tmp_path / "printing" / "train.py").write_text(GAN)
    try:
        assert main(["audit", *JSON, "-m", "printing.train"]) == 0
    finally:
        for name in [name for name in sys.modules if name.startswith("printing")]:
            del sys.modules[name]
    captured = capfd.readouterr()
    assert json.loads(captured.out)["report"]["complete"] and captured.err == "imported\n"


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
    assert [each["what"] for each in ran.json["report"]["order"]][-2:] == [
        "'schedule' advances",
        "gradients set to zero",
    ]
    assert ran.json["report"]["findings"] == []
    assert ran.json["report"]["complete"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_loss_that_is_computed_and_scaled_in_one_expression_is_known_to_be_scaled(audit: Audit, step: int):
    source = TRAINER.replace("        loss = nn", "        scaler.scale(nn").replace(
        "model(x), y)\n", "model(x), y)).backward()\n"
    )
    source = source.replace("    scaler.scale(loss).backward()\n", "")
    ran = audit(source, "--fp16", "--unscale", options=(*JSON, "--step", str(step)))
    assert [each["rule"] for each in ran.json["report"]["findings"]] == ["backward-under-autocast"]
    assert "backward, gradients scaled by 'scaler'" in [each["what"] for each in ran.json["report"]["order"]]


CRITIC = """\
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(5):
    for _ in range(3):
        for_critic.zero_grad()
        scaler.scale(critic(generator(torch.randn(16, 4)).detach()).mean()).backward()
        scaler.step(for_critic)
        scaler.update()
    for_generator.zero_grad()
    scaler.scale(-critic(generator(torch.randn(16, 4))).mean()).backward()
    clip_grad_norm_(generator.parameters(), 1.0)
    scaler.step(for_generator)
    scaler.update()
    print("iteration", step + 1)
"""


@pytest.mark.parametrize("step", [1, 2, 3])
def test_several_steps_of_a_critic_to_one_of_the_generator_are_one_iteration(audit: Audit, step: int):
    ran = audit(CRITIC, options=(*JSON, "--step", str(step)))
    steps = [each["what"] for each in ran.json["report"]["order"] if "steps" in each["what"]]
    assert steps == ["'for_critic' steps through 'scaler'"] * 3 + ["'for_generator' steps through 'scaler'"]
    line = CRITIC[: CRITIC.index("    clip_grad_norm_")].count("\n") + 1
    assert [(each["rule"], each["line"]) for each in ran.json["report"]["findings"]] == [("clip-before-unscale", line)]
    assert ran.json["report"]["complete"] and ran.json["steps"] == step
    assert ran.err.splitlines() == [f"iteration {number + 1}" for number in range(step)]


@pytest.mark.parametrize(("steps", "printed"), [(8, 8), (60, 22)])
def test_an_optimizer_that_never_steps_is_waited_for_a_while_and_costs_no_report(
    audit: Audit, steps: int, printed: int
):
    source = TRAINER.replace("optimizer = ", "unused = torch.optim.Adam(model.parameters())\noptimizer = ")
    ran = audit(source, "--steps", str(steps), options=JSON)
    assert ran.code == 0 and ran.json["report"]["steps"] == 1 and ran.json["report"]["complete"]
    assert len([line for line in ran.err.splitlines() if line.startswith("trained step")]) == printed


CLOSURE = """\
import torch
from torch import nn

model = nn.Linear(8, 4)
optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))


def closure():
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    return loss


for step in range(4):
    optimizer.step(closure)
    print("stepped")
"""


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # of torch 2.8's LBFGS itself
@pytest.mark.parametrize(("optimizer", "runs"), [("AdamW", 1), ("LBFGS", None)])
@pytest.mark.parametrize("step", [1, 2])
def test_an_iteration_whose_forward_runs_in_a_closure_is_a_whole_one(
    audit: Audit, optimizer: str, runs: int | None, step: int
):
    options = (*JSON, "--step", str(step))
    ran = audit(CLOSURE.replace("OPTIMIZER", optimizer), options=options)
    report = ran.json["report"]
    what = [each["what"] for each in report["order"]]
    assert (ran.code, report["steps"], report["complete"], report["findings"]) == (0, 1, True, [])
    assert what.count("'optimizer' steps") == 1 and what.count("backward") == (runs or what.count("backward")) > 0
    assert what.index("'optimizer' steps") > max(number for number, each in enumerate(what) if each == "backward")
    assert ran.err.splitlines().count("stepped") == step
    phases = {each["phase"] for each in report["ops"] if each["op"] == "addmm"}
    assert phases == {"forward"}  # though a step runs it
    assert {each["kind"] for each in report["storage"]} >= {"weights", "gradients"}
    updates = {each["phase"] for each in report["ops"] if each["family"] == "optimizer-update"}
    assert updates == {"optimizer"}


def test_a_cast_within_a_package_stands_on_the_line_of_the_program_that_led_there(audit: Audit, tmp_path: Path):
    package = tmp_path / "site-packages" / "library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def lower(model):\n    return model.bfloat16()\n")
    source = TRAINER.replace("optimizer = ", "library.lower(model)\noptimizer = ").replace(
        "model(x)", "model(x.bfloat16())"
    )
    source = "import sys; sys.path.insert(0, 'site-packages')\nimport library\n" + source
    findings = audit(source, options=JSON).json["report"]["findings"]
    found = next(each for each in findings if each["rule"] == "bf16-only-weights")
    assert found["path"] == "train.py"
    assert found["line"] == source[: source.index("library.lower")].count("\n") + 1


def test_of_two_optimizers_one_that_rests_makes_the_iteration_no_whole_one(audit: Audit):
    source = GAN.replace("    for_generator.step()", "    if step == 0:\n        for_generator.step()")
    assert not audit(source, options=JSON).json["report"]["complete"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        ([], "audit needs a script"),
        (["--step", "0", "x.py"], "is not the number of a step"),
        (["."], ".: a folder, not a script"),
        (["-m", "nowhere.at.all"], "-m nowhere.at.all: no such module"),
        (["-m", "xml"], "-m xml: a package without __main__.py"),
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


def test_the_readme_shows_what_the_command_prints(tmp_path: Path):
    readme = (PROJECTS.parents[1] / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("```text\naudit of ")[2].partition("```")[0].splitlines()
    shutil.copytree(PROJECTS / "digits", tmp_path / "digits")
    command = [sys.executable, "-m", "precisionlint", "audit", "train.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path / "digits", capture_output=True, text=True, check=False)
    printed = done.stdout.splitlines()
    assert len(shown) > 10
    assert [line for line in shown[1:] if not line.startswith("[") and line not in printed] == []
