"""The fixture programs under the real check: every mark is found, nothing else is, whatever way they are handed in.

A mark is a comment `# <- rule-name` (or several names with commas) at the end of the line where the finding must stand.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from precisionlint import catalogue, check
from precisionlint.findings import Finding, Report
from precisionlint.source import reading

ROOT = Path(__file__).parent.parent
FIXTURES = Path("fixtures")
RULES = frozenset(catalogue.load())
DEFAULT = frozenset(rule.name for rule in catalogue.load().values() if rule.on_by_default)
COMMAND = [sys.executable, "-m", "precisionlint", "check", "--no-cache", "--select", "all"]

SUFFIXES = catalogue.SUFFIXES.values()

ASKED = re.compile(r"^# silent: ([\w-]+)$", re.M)
"""Names a rule that is off by default and must find nothing in the file."""

POSSIBLE = re.compile(r"^# possible: ([\w-]+)$", re.M)
"""Names a rule of which the file shows what is only possible."""

Spot = tuple[str, int, str]


def programs() -> list[Path]:
    """Single files and folders below broken/ and sound/, and the projects."""
    found = []
    for group in ("broken", "sound", "projects"):
        for path in sorted((ROOT / FIXTURES / group).iterdir()):
            if path.is_dir() or path.suffix in SUFFIXES:
                found.append(path.relative_to(ROOT))
    return found


def files(program: Path) -> list[Path]:
    return sorted(path for path in program.rglob("*") if path.suffix in SUFFIXES) if program.is_dir() else [program]


def marks(path: Path) -> set[Spot]:
    """What must be found in the file. Lines end at newlines only: a form feed or a separator does not end one."""
    text = path.read_bytes().decode("latin-1" if "latin1" in path.name else "utf-8-sig")
    return {
        (path.as_posix(), number, name.strip())
        for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1)
        for name in line.partition("# <- ")[2].split(",")
        if name.strip()
    }


def spots(findings: tuple[Finding, ...]) -> set[Spot]:
    return {(finding.place.path, finding.place.line, finding.rule) for finding in findings}


@cache
def checked(path: Path) -> Report:
    """One file, checked alone; rules that are off by default where it has a mark of them, or asks for them."""
    text = path.read_text("utf-8", "replace")
    asked, possible = set(ASKED.findall(text)), set(POSSIBLE.findall(text))
    report = check([path.as_posix()], select=DEFAULT | asked | {rule for _, _, rule in marks(path)}, assume={})
    if not possible:
        return report
    more = check([path.as_posix()], select=possible, assume={}, min_confidence="possible")
    return replace(report, findings=(*report.findings, *more.findings))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("program", programs(), ids=str)
def test_every_mark_is_found_and_nothing_else(program: Path) -> None:
    for path in files(program):
        report = checked(path)
        assert spots(report.findings) == marks(path)
        assert report.errors == ()


@pytest.mark.parametrize("program", programs(), ids=str)
def test_no_place_is_reported_twice_for_one_rule(program: Path) -> None:
    for path in files(program):
        findings = checked(path).findings
        assert len(spots(findings)) == len(findings)


def test_marks_name_rules_and_every_rule_that_check_finds_is_marked_in_two_programs() -> None:
    programs_with: dict[str, set[Path]] = {rule: set() for rule in RULES}
    for program in programs():
        for path in files(program):
            for _, _, rule in marks(path):
                programs_with[rule].add(program)
    rare = {rule for rule in RULES if "check" in catalogue.find(rule).found_by and len(programs_with[rule]) < 2}
    assert not rare


def test_the_fixed_project_is_the_faulty_one_without_its_faults() -> None:
    faulty, fixed = FIXTURES / "projects" / "digits", FIXTURES / "projects" / "digits-fixed"
    assert [path.relative_to(faulty) for path in files(faulty)] == [path.relative_to(fixed) for path in files(fixed)]
    assert len(set().union(*(marks(path) for path in files(faulty)))) == 5
    assert not set().union(*(marks(path) for path in files(fixed)))


def alone() -> list[Finding]:
    """What a default run finds in each file by itself."""
    everything = (path for program in programs() for path in files(program))
    found = (finding for path in everything for finding in checked(path).findings)
    return [each for each in found if each.rule in DEFAULT and each.confidence != "possible"]


def test_a_file_gives_the_same_findings_alone_as_together_with_all_others() -> None:
    everything = [path for program in programs() for path in files(program)]
    together = check([path.as_posix() for path in everything], select=DEFAULT, assume={})
    assert sorted(together.findings, key=repr) == sorted(alone(), key=repr)


def test_a_folder_gives_the_same_findings_as_its_files() -> None:
    groups = [(FIXTURES / group).as_posix() for group in ("broken", "projects", "sound")]
    report = check(groups, select=DEFAULT, assume={})
    assert spots(report.findings) == spots(tuple(alone()))


def test_output_is_the_same_for_every_hash_seed_and_order_of_arguments() -> None:
    some = [
        "fixtures/projects",
        "fixtures/broken/native_scaler",
        "fixtures/broken/package",
        "fixtures/broken/half_weights_by_config.py",
        "fixtures/broken/step_dict_of_optimizers.py",
        "fixtures/sound/optimizers_in_containers.py",
        "fixtures/sound/src_layout",
    ]
    results = [run(*some, "--format", "json", PYTHONHASHSEED=seed) for seed in "012"]
    results.append(run(*reversed(some), "--format", "json", PYTHONHASHSEED="0"))
    assert {result.returncode for result in results} == {1}
    assert len({result.stdout for result in results}) == 1
    assert len({run(*some, "--verbose", PYTHONHASHSEED=seed).stdout for seed in "01"}) == 1


def test_a_program_with_more_choices_than_paths_is_read_to_its_end() -> None:
    report = checked(FIXTURES / "broken" / "many_choices.py")
    assert not [place for place in report.coverage.gave_up if "to the end" in place.what]


def test_neither_torch_nor_libcst_nor_yaml_is_imported() -> None:
    code = (
        "import sys; from precisionlint import check; from precisionlint import catalogue\n"
        "report = check(['fixtures/projects'], select=frozenset(catalogue.load()), assume={})\n"
        "print(len(report.findings), [name for name in ('torch', 'triton', 'numpy', 'libcst', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "5 []\n"


def test_an_assumption_silences_what_depends_on_the_other_configuration() -> None:
    path = "fixtures/broken/clip_then_unscale.py"

    def found(**assume: str) -> set[str]:
        return {finding.rule for finding in check([path], select=RULES, assume=assume).findings}

    assert found() == {"clip-before-unscale"}
    assert found(use_amp="True") == {"clip-before-unscale"}
    assert found(use_amp="False") == set()
    done = run("--assume", "use_amp=False", path)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_assumption_leaves_what_does_not_depend_on_it() -> None:
    report = check(["fixtures/projects/digits"], select=RULES, assume={"precision": "fp16"})
    whole = spots(check(["fixtures/projects/digits"], select=RULES, assume={}).findings)
    assert {rule for _, _, rule in whole - spots(report.findings)} == {"scaler-with-bf16"}


def test_a_finding_names_its_configuration() -> None:
    (finding,) = checked(FIXTURES / "broken" / "clip_then_unscale.py").findings
    assert "args.clip" in finding.when and ("use_amp" in finding.when or "scaler" in finding.when)
    (finding,) = checked(FIXTURES / "broken" / "enabled_by_dtype_clip.py").findings
    assert "float16" in finding.when


def test_a_finding_names_the_objects_of_the_program() -> None:
    (finding,) = checked(FIXTURES / "broken" / "clip_named_amp.py").findings
    assert "'amp'" in finding.message and "'optim'" in finding.message


def way(path: str) -> list[tuple[str, str]]:
    """The places that led to the one finding of a file: their files, and their lines' text without what is repeated."""
    (finding,) = checked(FIXTURES / path).findings
    places = []
    for step in finding.trace:
        line = Path(step.place.path).read_text(encoding="utf-8").split("\n")[step.place.line - 1]
        place = (Path(step.place.path).name, line.partition("  # <-")[0].strip())
        if places[-1:] != [place]:
            places.append(place)
    return places


def test_the_trace_shows_where_it_was_scaled_and_where_it_was_clipped() -> None:
    assert way("broken/clip_in_trainer_methods.py") == [
        ("clip_in_trainer_methods.py", "self.scaler.scale(loss).backward()"),
        (
            "clip_in_trainer_methods.py",
            "nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)",
        ),
    ]


def test_the_trace_leads_through_the_other_files() -> None:
    assert way("broken/clip_across_three_files/train.py") == [
        ("train.py", "scaler.scale(loss).backward()"),
        ("gradients.py", "torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=None)"),
    ]


HARD = sorted((ROOT / FIXTURES / "bad").glob("*.py"))
UNREADABLE = {
    "cut_off": 21,
    "latin1_without_coding": 1,
    "nul_bytes": 11,
    "python2": 23,
    "syntax_error": 13,
    "tabs_and_spaces": 21,
    "unknown_coding": None,
}
"""Which of the hard inputs are no Python, and the line to name."""


@pytest.mark.parametrize("path", HARD, ids=lambda path: path.stem)
def test_a_hard_input_is_read_or_given_one_line(path: Path) -> None:
    path = path.relative_to(ROOT)
    done = run("--format", "json", path.as_posix())
    result = json.loads(done.stdout)
    assert {(spot["path"], spot["line"], spot["rule"]) for spot in result["findings"]} == marks(path)
    if path.stem not in UNREADABLE:
        assert (done.returncode, done.stderr, result["errors"]) == (int(bool(marks(path))), "", [])
        return
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    (error,) = result["errors"]
    assert (error["path"], error["line"]) == (path.as_posix(), UNREADABLE[path.stem])
    assert path.as_posix() in line and error["message"] in line


def test_an_unreadable_file_does_not_hide_the_findings_of_the_others() -> None:
    done = run("--format", "json", "fixtures/bad")
    result = json.loads(done.stdout)
    expected = set().union(*(marks(path.relative_to(ROOT)) for path in HARD))
    assert done.returncode == 2
    assert {(spot["path"], spot["line"], spot["rule"]) for spot in result["findings"]} == expected
    assert [Path(error["path"]).stem for error in result["errors"]] == sorted(UNREADABLE)
    assert len(done.stderr.splitlines()) == len(UNREADABLE)


HEAD = "import torch\nfrom torch import nn\n\ntorch.set_float32_matmul_precision('high')\n"
FAULT = """
def train(model, optimizer, batches):
    scaler = torch.amp.GradScaler("cuda")
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def hard(tmp_path: Path, text: str) -> tuple[int, list[str], list[str]]:
    """Exit code, the rules found, and the lines on standard error, of a run over a generated file."""
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    done = run("--format", "json", str(path))
    return done.returncode, [spot["rule"] for spot in json.loads(done.stdout)["findings"]], done.stderr.splitlines()


def test_a_pipe_that_is_called_like_a_module_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    os.mkfifo(tmp_path / "options.py")
    program = """import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
    assert hard(tmp_path, program)[0] == 0
    assert run(str(tmp_path / "train.py"), "--assume", "nothing=1").returncode == 0


def test_three_thousand_nested_parentheses_are_one_line(tmp_path: Path) -> None:
    code, found, lines = hard(tmp_path, f"{HEAD}x = {'(' * 3000}1{')' * 3000}\n{FAULT}")
    assert (code, found, len(lines)) == (2, [], 1)


def test_twenty_thousand_elifs_are_read_or_one_line(tmp_path: Path) -> None:
    chain = "".join(f"    elif step == {n}:\n        lr = {n}\n" for n in range(1, 20_000))
    code, found, lines = hard(
        tmp_path, f"{HEAD}def rate(step):\n    if step == 0:\n        lr = 0\n{chain}    return lr\n{FAULT}"
    )
    assert (code, found, len(lines)) in ((2, [], 1), (1, ["clip-before-unscale"], 0))


def test_a_sum_of_three_thousand_terms_is_read(tmp_path: Path) -> None:
    assert hard(tmp_path, f"{HEAD}x = {' + '.join(['1'] * 3000)}\n{FAULT}") == (1, ["clip-before-unscale"], [])
    loss = "loss = model(x)"
    code, found, lines = hard(tmp_path, HEAD + FAULT.replace(loss, loss + " + model(x)" * 3000))
    assert (code, lines) == (1, []) and found == ["clip-before-unscale"]


def test_a_file_of_twenty_thousand_lines_is_read(tmp_path: Path) -> None:
    filler = "".join(f"\n\ndef f{n}(x):\n    y = x + {n}\n    return y\n" for n in range(4_000))
    assert hard(tmp_path, f"{HEAD}{filler}{FAULT}") == (1, ["clip-before-unscale"], [])


def test_a_loop_of_a_thousand_branches_is_read(tmp_path: Path) -> None:
    branches = "".join(f"        if flags[{n}]:\n            loss = loss + {n}\n" for n in range(1_000))
    code, found, lines = hard(tmp_path, HEAD + FAULT.replace("        scaler.scale", f"{branches}        scaler.scale"))
    assert (code, found, lines) == (1, ["clip-before-unscale"], [])


def test_a_method_that_trains_is_read_where_all_that_calls_it_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BUDGET", 1_200)
    questions = "\n".join(
        f"            if self.config.enabled_{i}:\n                self.optim_{i} = self.optimizer.param_groups[{i}]"
        for i in range(100)
    )
    program = tmp_path / "trainer.py"
    program.write_text(
        f"""
import torch


class Trainer:
    def __init__(self, model, config):
        self.model = model
        self.config = config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self, train, validation):
        while self.config.epoch < self.config.epochs:
            for stage in ("loss", "accuracy", "calibration"):
                self.report(validation[stage])
            self.train_epoch(train)

    def report(self, validation):
        self.scale = self.scaler.get_scale()
        for batch in validation:
{questions}

    def train_epoch(self, train):
        for x, y in train:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            if self.config.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)  # here
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""
    )
    report = check([program.as_posix()])
    line = program.read_text().partition("  # here")[0].count("\n") + 1
    assert "too many paths to follow to the end" in {each.what for each in report.coverage.gave_up}
    assert {(each.rule, each.place.line) for each in report.findings} == {("clip-before-unscale", line)}


def test_classes_that_inherit_from_themselves_and_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("from train import Trainer\n\n\nclass Base(Trainer):\n    pass\n")
    mixed = "from other import *\nfrom other import Base\n\n\nclass Trainer(Base, Trainer):\n    def go(self):\n"
    body = "        self.go()\n        super().go()\n        train(self.model, self.optimizer, self.batches)\n"
    assert hard(tmp_path, f"{HEAD}{mixed}{body}{FAULT}") == (1, ["clip-before-unscale"], [])


def test_functions_that_call_each_other_forever_end(tmp_path: Path) -> None:
    circle = (
        "\n\ndef a(*args):\n    b(*args)\n    train(*args)\n\n\ndef b(*args):\n    a(*args)\n    c(lambda: b(*args))\n"
    )
    callback = "\n\ndef c(f):\n    f()\n    c(f)\n"
    assert hard(tmp_path, f"{HEAD}{circle}{callback}{FAULT}") == (1, ["clip-before-unscale"], [])


def test_links_that_lead_nowhere_or_in_a_circle_are_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "dead.py").symlink_to("nothing.py")
    (tmp_path / "circle.py").symlink_to("circle.py")
    done = run("--format", "json", str(tmp_path / "dead.py"), str(tmp_path / "circle.py"))
    assert done.returncode == 2
    assert [Path(error["path"]).name for error in json.loads(done.stdout)["errors"]] == ["circle.py", "dead.py"]
    assert len(done.stderr.splitlines()) == 2


DRIVER = """
import runpy, sys
for command in {commands!r}:
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, stop.code
"""


@pytest.mark.parametrize("project", ["digits", "digits-fixed"])
def test_the_project_is_a_program_that_trains(project: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    few = ["--steps", "3", "--device", "cpu", "--out", str(tmp_path)]
    commands = [
        ["train.py", *few, "--epochs", "1", "--model", "transformer"],
        ["pretrain.py", *few],
        ["finetune.py", *few, "--checkpoint", str(tmp_path / "last.pt")],
    ]
    folder = ROOT / FIXTURES / "projects" / project
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    code = DRIVER.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "finetuned.pt").exists()


RECIPE = """\
import copy

import torch
from torch import nn


def main(loader):
    model = nn.Linear(8, 8).cuda()
    {before}
    optimizer = torch.optim.AdamW({weights}, lr=1e-4)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""


@pytest.mark.parametrize(
    ("before", "weights", "after", "dtype"),
    [
        ("pass", "model.parameters()", "pass", "fp32"),
        ("model.bfloat16()", "model.parameters()", "pass", "bf16"),
        ("model = nn.Sequential(model.half())", "model.parameters()", "pass", "fp16"),
        ("part = model.half(); model = nn.Sequential(part)", "model.parameters()", "pass", "fp16"),
        ("model = copy.deepcopy(model.bfloat16())", "model.parameters()", "pass", "bf16"),
        ("model.bfloat16()", "chosen(model)", "pass", "bf16"),
        ("reward = nn.Linear(8, 1).half()", "model.parameters()", "pass", "fp32"),
        ("pass", "model.parameters()", "torch.save(copy.deepcopy(model).half(), 'a.pt')", "fp32"),
        ("pass", "chosen(model)", "torch.save(copy.deepcopy(model).half(), 'a.pt')", "fp32"),
    ],
)
def test_a_recipe_tells_the_dtype_of_the_weights_that_are_stepped(
    tmp_path: Path, before: str, weights: str, after: str, dtype: str
) -> None:
    (tmp_path / "train.py").write_text(RECIPE.format(before=before, weights=weights, after=after))
    report = checked(tmp_path / "train.py")
    assert report.coverage.recipes == (f"no autocast, AdamW on {dtype} weights",)


def test_what_enables_a_scaler_is_a_condition_of_what_is_missing_from_the_checkpoint() -> None:
    report = check(["fixtures/projects/digits"], select=frozenset({"scaler-not-checkpointed"}), assume={})
    assert [finding.when for finding in report.findings] == ["args.precision != 'fp32'"]


SAVES = """\
import torch


def train(model, loader, args):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, "last.pt")
        if loss < args.best:
            torch.save(state, "best.pt")
    torch.save(state, "end.pt")
"""


def test_one_fault_at_every_save_is_told_once_with_the_other_places(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVES)
    (finding,) = check([str(tmp_path)], select=["scaler-not-checkpointed"]).findings
    assert finding.place.line == 15
    assert [(step.place.line, step.message) for step in finding.trace[-3:]] == [
        (15, "saved without the scaler's state"),
        (17, "and here"),
        (18, "and here"),
    ]
    two = SAVES.replace("def train(", "def train_other(").replace("import torch\n", "")
    (tmp_path / "train.py").write_text(SAVES + two)
    assert len(check([str(tmp_path)], select=["scaler-not-checkpointed"]).findings) == 2


def test_where_paths_are_joined_a_loss_made_outside_of_autocast_stays_one(tmp_path: Path) -> None:
    """What the branch without amp runs backward never saw the region, however many paths have been joined before."""
    program = tmp_path / "train.py"
    program.write_text(
        """\
import torch


def train(model, criterion, loader, optimizer, max_norm=0, args=None):
    try:
        denoise = args.denoise
    except AttributeError:
        denoise = False
    for x, y in loader:
        with torch.cuda.amp.autocast(enabled=args.amp):
            if denoise:
                outputs = model(x, y)
            else:
                outputs = model(x)
            losses = criterion(outputs, y)
            weights = criterion.weights
            loss = sum(losses[k] * weights[k] for k in losses.keys() if k in weights)
        if args.amp:
            optimizer.zero_grad()
            loss.backward()  # here
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        if args.cycle:
            optimizer.scheduler.step()
"""
    )
    report = check([program.as_posix()])
    line = program.read_text().partition("  # here")[0].count("\n") + 1
    assert [(each.rule, each.place.line, each.when) for each in report.findings if each.severity == "error"] == [
        ("fp16-without-scaler", line, "args.amp")
    ]
