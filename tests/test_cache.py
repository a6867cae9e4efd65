"""The cache answers only what still holds, and many processes find what one does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import CLIP, CLIP_CALL, SOUND

import precisionlint
from precisionlint import cache, cli, pool
from precisionlint.findings import Report
from precisionlint.reader import Plan

HELPERS = "from torch import nn\n\n\ndef clip(model):\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
CALLS = CLIP.replace(CLIP_CALL, "clip(model)").replace(
    "from torch import nn", "from torch import nn\nfrom helpers import clip"
)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRECISIONLINT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project/setup.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


def write(name: str, text: str = CLIP) -> None:
    """Writes a file that was there before: as if the next run began later."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    time.sleep(2 * cache.MOMENT)


READ: list[str] = []


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes which files are read rather than answered from the cache."""
    from precisionlint.reader import Reader

    real = Reader.read

    def noted(self: Reader, display: str, path: Path) -> object:
        READ.append(display)
        return real(self, display, path)

    monkeypatch.setattr(Reader, "read", noted)


def checked(*paths: str, **options: object) -> tuple[list[str], Report]:
    """(files that were read, the report)."""
    READ.clear()
    report = precisionlint.check(paths or (".",), cache=True, **options)  # type: ignore[arg-type]
    return list(READ), report


def rules(report: Report) -> list[tuple[str, str]]:
    return [(each.place.path, each.rule) for each in report.findings]


def test_what_was_read_is_not_read_again_and_told_the_same():
    write("train.py")
    write("sub/sound.py", SOUND)
    write("sub/other.py", "x = 1\n")
    write("noted.py", CLIP.replace(CLIP_CALL, f"{CLIP_CALL}  # precisionlint: ignore[clip-before-unscale] so"))
    write("broken.py", f"{CLIP}\nx = (")
    first = checked()
    assert sorted(first[0]) == ["broken.py", "noted.py", "sub/sound.py", "train.py"]
    again = checked()
    assert again == ([], first[1])
    assert len(again[1].errors) == len(again[1].suppressed) == len(again[1].findings) == 1


def test_a_result_is_named_as_the_run_names_it(monkeypatch: pytest.MonkeyPatch):
    write("helpers.py", HELPERS)
    write("sub/train.py", CALLS)
    checked()
    for place, name in (
        (".", "sub/train.py"),
        ("sub", "train.py"),
        ("..", "project/sub/train.py"),
        (".", str(Path("sub/train.py").resolve())),
    ):
        with monkeypatch.context() as there:
            there.chdir(place)
            read, report = checked(name)
            uncached = precisionlint.check([name])
        assert (read, report) == ([], uncached)
        assert [f.place.path for f in report.findings] == [name]


def test_a_changed_file_alone_is_read_again():
    write("a.py")
    write("b.py")
    write("sound.py", SOUND)
    checked()
    write("a.py", SOUND)
    assert (lambda seen: (seen[0], rules(seen[1])))(checked()) == (["a.py"], [("b.py", "clip-before-unscale")])
    assert checked()[0] == []
    write("b.py", SOUND)
    assert checked()[0] == ["b.py"]


STEP = """import torch


def step(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
MAIN = """import torch
{imported}


def main(loader):
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled={on})
    for x in loader:
        optimizer.zero_grad()
        {call}


main([])
"""
CALLED = {"imported": "from steps import step", "call": "step(model, optimizer, scaler, model(x).mean())"}
UNCALLED = {"imported": "", "call": "print(x)"}


def clipped(report: Report) -> bool:
    return ("steps.py", "clip-before-unscale") in rules(report)


def test_what_callers_may_rule_out_is_asked_again_when_they_change_or_another_file_comes_to_call():
    write("steps.py", STEP)
    write("main.py", MAIN.format(on=False, **UNCALLED))
    write("other.py", "import torch\n\n\ndef other(x):\n    x.backward()\n")
    assert clipped(checked()[1])
    write("main.py", MAIN.format(on=True, **UNCALLED))
    assert checked()[0] == ["main.py"]
    write("main.py", MAIN.format(on=False, **CALLED))
    read, report = checked()
    assert (sorted(read), clipped(report)) == (["main.py", "steps.py"], False)
    assert checked()[0] == []
    write("other.py", "import torch\n\n\ndef other(x):\n    x.sum().backward()\n")
    assert checked()[0] == ["other.py"]
    write("main.py", MAIN.format(on=True, **CALLED))
    checked("main.py")
    read, report = checked("steps.py")
    assert (read, clipped(report)) == (["steps.py"], True)


def test_a_caller_that_changed_is_asked_again_though_nothing_has_read_it_since():
    write("steps.py", STEP)
    write("main.py", MAIN.format(on=True, **CALLED))
    assert clipped(checked("steps.py")[1])
    write("main.py", MAIN.format(on=False, **CALLED))
    assert not clipped(checked("steps.py")[1])


def test_contents_decide_not_times():
    write("train.py")
    os.utime("train.py", (1, 1))
    time.sleep(2 * cache.MOMENT)
    checked()
    os.utime("train.py", (2, 2))
    assert checked()[0] == []
    before = os.stat("train.py")
    write("train.py", CLIP.replace("1.0)", "2.0)"))
    os.utime("train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat("train.py").st_size == before.st_size
    assert checked()[0] == ["train.py"]


def test_a_result_falls_with_a_file_that_its_reading_led_to():
    write("helpers.py", HELPERS)
    write("train.py", CALLS)
    write("sound.py", SOUND)
    _, report = checked("train.py", "sound.py")
    assert rules(report) == [("train.py", "clip-before-unscale")]
    assert checked()[0] == ["helpers.py"]
    write("helpers.py", HELPERS.replace("    nn.utils", "    return\n    nn.utils"))
    read, report = checked("train.py", "sound.py")
    assert (read, rules(report)) == (["train.py"], [])
    Path("helpers.py").unlink()
    assert checked("train.py", "sound.py")[0] == ["train.py"]


def test_a_change_that_another_run_saw_is_not_forgotten():
    write("helpers.py", HELPERS)
    write("one.py", CALLS)
    write("two.py", CALLS)
    checked("one.py", "two.py")
    write("helpers.py", HELPERS.replace("    nn.utils", "    return\n    nn.utils"))
    assert rules(checked("one.py")[1]) == []
    read, report = checked("two.py")
    assert (read, rules(report)) == (["two.py"], [])


def test_a_module_that_comes_up_where_none_was_changes_the_answer():
    write("sub/train.py", CALLS)
    write("helpers.py", HELPERS)
    assert rules(checked("sub/train.py")[1]) == [("sub/train.py", "clip-before-unscale")]
    write("sub/helpers.py", HELPERS.replace("    nn.utils", "    return\n    nn.utils"))
    read, report = checked("sub/train.py")
    assert (read, rules(report)) == (["sub/train.py"], [])
    assert checked("sub/train.py")[0] == []
    Path("sub/helpers.py").unlink()
    assert rules(checked("sub/train.py")[1]) == [("sub/train.py", "clip-before-unscale")]


FP32 = (
    "import torch\nmodel = torch.nn.Linear(2, 2).cuda()\nopt = torch.optim.SGD(model.parameters())\n"
    "model(x).sum().backward()\nopt.step()\n"
)


def test_a_setting_that_any_file_of_the_project_may_make_is_looked_for_again():
    write("train.py", FP32)
    assert rules(checked("train.py")[1]) == [("train.py", "tf32-off")]
    write("unrelated.py", "x = 1\n")
    assert checked("train.py")[0] == []
    write("main.py", "import torch\nimport train\ntorch.set_float32_matmul_precision('high')\n")
    read, report = checked("train.py")
    assert (read, rules(report)) == (["train.py"], [])
    assert checked("train.py")[0] == []
    Path("main.py").unlink()
    assert rules(checked("train.py")[1]) == [("train.py", "tf32-off")]


NORM = """import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
"""
TRAINER = """import torch
from norm import Norm


def train(loader):
    model = Norm()
    {cast}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
"""


def test_what_the_project_shows_is_asked_again_when_any_file_of_it_changes():
    write("norm.py", NORM)
    write("train.py", TRAINER.format(cast="model.cuda()"))
    assert checked("norm.py")[0] == ["norm.py"]
    assert checked("norm.py")[0] == []
    write("train.py", TRAINER.format(cast="model.to(torch.bfloat16)"))
    read, report = checked("norm.py")
    assert (read, rules(report)) == (["norm.py"], [("norm.py", "norm-without-upcast")])
    assert checked("norm.py")[0] == []
    checked("train.py")
    write("train.py", TRAINER.format(cast="model.cuda()"))
    checked("train.py")
    assert rules(checked("norm.py")[1]) == []


def test_other_rules_assumptions_and_devices_are_other_results_and_the_rest_is_judged_anew():
    write("train.py")
    checked()
    assert checked(select=["master-weights"])[0] == ["train.py"]
    assert checked(assume={"a": "1"})[0] == ["train.py"]
    assert checked(device="cpu")[0] == ["train.py"]
    assert checked()[0] == []
    read, report = checked(severity={"all": "info"}, per_file_ignores={"nothing": ["all"]})
    assert (read, report.findings[0].severity) == ([], "info")


def test_notebooks_and_blocks_of_markdown_are_kept_too():
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": CALLS}
    write("a.ipynb", json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    write("docs.md", f"```python\nx\n```\n```python\n{CALLS}```\n")
    write("helpers.py", HELPERS)
    read, first = checked(".", markdown=True)
    assert (sorted(read), len(first.findings)) == (["a.ipynb", "docs.md", "helpers.py"], 2)
    assert checked(".", markdown=True) == ([], first)
    write("helpers.py", HELPERS.replace("    nn.utils", "    return\n    nn.utils"))
    read, report = checked("a.ipynb", "docs.md")
    assert (sorted(read), report.findings) == (["a.ipynb", "docs.md"], ())


def caches() -> list[Path]:
    return sorted(Path("../cache").glob("*.json"))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"precisionlint cache 1 0\n[]",
        b"\xff\xfe\x00",
        b"another program's\n{}",
        b"[" * 100_000,
        pytest.param(None, id="one byte"),
        pytest.param("foreign", id="well made and of another shape"),
    ],
)
def test_a_broken_cache_is_read_as_none_and_replaced(damage: bytes | str | None):
    write("train.py")
    _, first = checked()
    (file,) = caches()
    whole = file.read_bytes()
    if damage == "foreign":
        body = json.dumps(
            [{"train.py": [cache.digest(CLIP.encode()), None, {}]}, {"train.py": [[], [1, 2], [3]]}, None]
        ).encode()
        damage = f"{cache.HEADER}{cache.digest(body)}\n".encode() + body
    assert not isinstance(damage, str)
    file.write_bytes(whole.replace(b"clipped", b"chipped", 1) if damage is None else damage)
    assert checked() == (["train.py"], first)
    assert checked() == ([], first)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, capsys):
    write("train.py")
    Path("../file").write_text("")
    monkeypatch.setenv("PRECISIONLINT_CACHE_DIR", "../file/cache")
    for _ in range(2):
        assert checked()[0] == ["train.py"]
    monkeypatch.delenv("PRECISIONLINT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    assert checked()[0] == ["train.py"]


def test_a_full_disk_leaves_no_half_cache(monkeypatch: pytest.MonkeyPatch):
    write("train.py")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        checked()
    assert [each.name for each in Path("../cache").iterdir()] == [".gitignore"]


def test_where_the_cache_lies_and_that_it_can_be_left_out(capsys):
    write("train.py")
    assert cli.main(["check", ".", "--no-cache"]) == 1
    assert not caches()
    assert cli.main(["check", ".", "--cache-dir", "here"]) == 1
    assert len(list(Path("here").glob("*.json"))) == 1
    shutil.rmtree("here")
    write("precisionlint.toml", 'cache-dir = ".kept"\n')
    assert cli.main(["check", "."]) == 1
    assert len(list(Path(".kept").glob("*.json"))) == 1
    assert cli.main(["check", "."]) == 1


def test_old_caches_are_taken_away():
    write("train.py")
    checked()
    (file,) = caches()
    for name in ("old.json", "old.new"):
        old = file.with_name(name)
        old.write_text("")
        os.utime(old, (1, 1))
    checked(select=["all"])
    assert len(caches()) == 2
    assert not list(file.parent.glob("old*"))


@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_a_run_answered_from_the_cache_imports_no_front_end(form: str):
    write("train.py")  # its fix is part of json and sarif
    write("helpers.py", HELPERS)
    write("fp32.py", FP32)
    script = (
        "import sys\nfrom precisionlint import cli\ncode = cli.main(['check', '.', '--format', sys.argv[1]])\n"
        "heavy = {'libcst', 'rich', 'yaml', 'subprocess', 'precisionlint.source.run', 'precisionlint.source.project'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, form]
    told = [subprocess.run(command, capture_output=True, text=True).stdout for _ in range(2)]
    assert ('"edits"' in told[0] or '"fixes"' in told[0]) == (form != "text")
    assert told[0].replace(told[0].splitlines()[-1], "") == told[1].replace(told[1].splitlines()[-1], "")
    assert told[1].splitlines()[-1] == "1 []"


@pytest.mark.parametrize(
    ("changed", "text"),
    [("train.py", SOUND), ("helpers.py", HELPERS.replace("    nn.utils", "    return\n    nn.utils"))],
)
def test_a_file_that_changes_while_it_is_read_is_not_kept(changed: str, text: str, monkeypatch: pytest.MonkeyPatch):
    from precisionlint.reader import Reader

    write("helpers.py", HELPERS)
    write("train.py", CALLS)
    real = Reader.file

    def meanwhile(self: Reader, display: str, path: Path, data: bytes) -> object:
        result = real(self, display, path, data)
        Path(changed).write_text(text)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "file", meanwhile)
        checked("train.py")
    time.sleep(2 * cache.MOMENT)
    read, report = checked("train.py")
    assert (read, report.findings) == (["train.py"], ())


# processes


def many(count: int) -> None:
    for number in range(count):
        Path(f"train{number}.py").write_text(CALLS if number % 3 else CLIP)
    write("helpers.py", HELPERS)


def test_many_processes_find_what_one_does_and_keep_it():
    many(12)
    Path("broken.py").write_text(f"{CLIP}\nx = (")
    one = precisionlint.check(".")
    assert precisionlint.check(".", jobs=3) == one
    assert precisionlint.check(".", jobs=50, cache=True) == one
    time.sleep(2 * cache.MOMENT)
    precisionlint.check(".", jobs=2, cache=True)
    assert checked() == ([], one)


def test_processes_need_no_main_module_that_can_be_imported(tmp_path: Path):
    many(4)
    script = tmp_path / "unguarded.py"
    script.write_text("import precisionlint\nprint(len(precisionlint.check('.', jobs=2).findings))\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.stderr) == ("4\n", "")


def test_a_process_that_dies_costs_the_file_that_it_died_of(monkeypatch: pytest.MonkeyPatch):
    many(5)
    deadly = pool.START.replace(
        "main()",
        "from precisionlint import reader; real = reader.Reader.file\n"
        "def file(self, display, path, data):\n"
        "    if display == 'train2.py': import os; os._exit(11)\n"
        "    return real(self, display, path, data)\n"
        "reader.Reader.file = file\nmain()",
    )
    monkeypatch.setattr(pool, "START", deadly.replace("{", "{{").replace("}", "}}").replace("{{path!r}}", "{path!r}"))
    report = precisionlint.check(".", jobs=2)
    assert [(error.path, error.message) for error in report.errors] == [
        ("train2.py", "the process that read it died; please report it")
    ]
    assert len(report.findings) == 4


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_an_interrupt_ends_all_processes_and_says_nothing():
    many(200)
    script = (
        "import signal, sys\nfrom precisionlint import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(cli.main(['check', '.', '--no-cache', '--jobs', '2']))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True) as process:
        workers: list[int] = []
        while len(workers) < 2 and process.poll() is None:
            workers = children(process.pid)
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert not [each for each in workers if Path(f"/proc/{each}/stat").exists()]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5"])
def test_a_number_of_processes_that_is_none(jobs: str, capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", ".", "--jobs", jobs])
    assert f"'{jobs}' is not a number of processes, such as 4" in capsys.readouterr().err


def test_small_runs_start_no_process():
    from precisionlint.checking import PAYS, jobs_for

    assert jobs_for(None, PAYS // 2, 10) == 1
    assert jobs_for(4, 0, 2) == 2
    assert jobs_for(4, 0, 0) == 1


def test_tasks_hold_every_file_once_and_neighbours_together():
    plan = Plan(frozenset({"a"}))
    files = [(f"{number}.py", f"{number}.py") for number in range(100)]
    tasks = pool.tasks_of([(plan, files)], 2)
    assert [file for _, held in tasks for file in held] == files
    assert len(tasks) >= 8


def test_the_fixtures_are_told_alike_in_one_process_in_several_and_from_the_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    one = precisionlint.check("fixtures", select=["all"])
    assert len(one.findings) > 100
    assert precisionlint.check("fixtures", select=["all"], jobs=2, cache=True) == one
    assert checked("fixtures", select=["all"])[1] == one
