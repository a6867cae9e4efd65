"""The command line: options, exit codes, streams and terminals. What a check finds is held elsewhere."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import CLIP, SOUND

from precisionlint import __version__, catalogue, cli
from precisionlint.checking import Request
from precisionlint.config import Settings
from precisionlint.findings import Coverage, FileError, Finding, GaveUp, Place, Report

COMMAND = [sys.executable, "-m", "precisionlint"]
ERROR = Finding("clip-before-unscale", "loss-scaling", "error", "certain", "clipped", Place("train.py", 1, 1, 1, 5))
NOTHING = Report((), (), Coverage(1, 1, 1, 1, 1, 1))


class Checker:
    """Stands in for `precisionlint.checking`: keeps what it was asked, and answers with a report made beforehand."""

    def __init__(self) -> None:
        self.report = NOTHING
        self.request: Request | None = None

    def check(self, request: Request) -> Report:
        self.request = request
        return self.report

    @property
    def settings(self) -> Settings:
        assert self.request is not None
        return self.request.configuration.of_folder(Path.cwd())


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Checker:
    checker, module = Checker(), ModuleType("precisionlint.checking")
    module.check = checker.check  # type: ignore[attr-defined]
    module.Request = Request  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "precisionlint.checking", module)
    return checker


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that says what is wrong with a command line; the exit code is 2 and standard output empty."""
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    said, *hint = err.splitlines()
    assert not hint or (len(hint) == 1 and hint[0].endswith("--help` lists the options"))
    return said


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, **options)


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command prints when its standard output is a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "80", **environment}
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "COLUMNS")}
    with subprocess.Popen([*COMMAND, *arguments], stdout=theirs, env=kept | environment) as process:
        os.close(theirs)
        chunks = []
        while chunk := _read(ours):
            chunks.append(chunk)
    os.close(ours)
    assert process.returncode == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""


def test_version():
    ran = run("--version")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"precisionlint {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "arguments are required: COMMAND"),
        (["chekc"], "invalid choice: 'chekc'"),
        (["check"], "arguments are required: PATH"),
        (["check", "a.py", "--formt", "json"], "--formt is no option; did you mean --format?"),
        (["check", "a.py", "--sel", "all"], "--sel is no option"),
        (["check", "a.py", "--format", "xml"], "invalid choice: 'xml'"),
        (["check", "a.py", "--select", ","], "--select: names no rule"),
        (["check", "a.py", "--select", "clip-befor-unscale"], "did you mean 'clip-before-unscale'?"),
        (["check", "a.py", "--extend-select", "loss-scalin"], "did you mean 'loss-scaling'?"),
        (
            ["check", "a.py", "--ignore", "xyzzy"],
            "no rule or family is called 'xyzzy'; `precisionlint rules` lists them",
        ),
        (["check", "a.py", "--ignore", "all"], "these settings leave no rule to look for"),
        (["check", "a.py", "--select", "lost-updates"], "check finds none of these rules"),
        (["check", "a.py", "--assume", "use_amp"], "'use_amp' is not NAME=VALUE"),
        (["check", "a.py", "--assume", "=True"], "'=True' is not NAME=VALUE"),
        (["check", "a.py", "--assume", "a b=True"], "'a b=True' is not NAME=VALUE"),
        (["check", "a.py", "--assume", "a=1", "--assume", "a=2"], "--assume gives a two values, 1 and 2"),
        (
            ["explain", "clip-befor-unscale"],
            "no rule is called 'clip-befor-unscale'; did you mean 'clip-before-unscale'?",
        ),
        (["explain"], "arguments are required: NAME"),
    ],
)
def test_wrong_usage_is_one_complaint_and_exit_code_2(checker, capsys, arguments: list[str], complaint: str):
    assert complaint in usage_error(capsys, *arguments)
    assert checker.request is None


def test_check_hands_on_what_it_was_told(checker: Checker):
    options = ["--assume", "args.fp16=True", "--assume", "mode = a=b", "--no-cache"]
    assert cli.main(["check", "b.py", "a", *options]) == 0
    assert checker.request is not None
    assert list(checker.request.paths) == ["b.py", "a"]
    assert checker.settings.assume == {"args.fp16": "True", "mode": "a=b"}
    assert checker.settings.rules == catalogue.select()


def test_selections_may_be_repeated_and_separated_by_commas(checker: Checker):
    cli.main(
        ["check", "a", "--select", "loss-scaling, tf32-off", "--select", "double-unscale", "--ignore", "loss-scaling"]
    )
    assert checker.settings.rules == {"tf32-off", "double-unscale"}
    cli.main(["check", "a", "--extend-select", "all"])
    assert checker.settings.rules == set(catalogue.load())


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (NOTHING, 0),
        (Report((ERROR,), (), NOTHING.coverage), 1),
        (Report((ERROR,), (FileError("b.py", 1, "invalid syntax"),), NOTHING.coverage), 2),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_exit_code_is_the_reports(checker: Checker, report: Report, code: int, form: str):
    checker.report = report
    assert cli.main(["check", "a.py", "--format", form]) == code


def test_findings_go_to_standard_output_and_errors_to_standard_error(checker: Checker, capsys):
    checker.report = Report((ERROR,), (FileError("b.py", 3, "invalid syntax"),), NOTHING.coverage)
    cli.main(["check", "."])
    out, err = capsys.readouterr()
    assert out.startswith("train.py:1:1: error clip-before-unscale: clipped\n")
    assert err == "precisionlint: b.py:3: invalid syntax\n"
    cli.main(["check", ".", "--format", "json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["errors"] == [{"path": "b.py", "line": 3, "message": "invalid syntax"}]
    assert err == "precisionlint: b.py:3: invalid syntax\n"


def test_no_python_files_is_said_and_is_no_failure(checker: Checker, capsys):
    checker.report = Report((), (), Coverage(0, 0, 0, 0, 0, 0))
    assert cli.main(["check", "docs", "data"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("found nothing\n")
    assert err == "precisionlint: no Python and no configuration files in docs, data\n"


def test_verbose_names_what_reading_gave_up_on(checker: Checker, capsys):
    checker.report = Report((), (), Coverage(1, 1, 1, 1, 1, 1, (), (GaveUp("a.py", 7, "a registry"),)))
    cli.main(["check", "a.py"])
    assert "a registry" not in capsys.readouterr().out
    cli.main(["check", "a.py", "--verbose"])
    assert "a.py:7: a registry" in capsys.readouterr().out


@pytest.mark.parametrize(("choice", "colored"), [("auto", False), ("always", True), ("never", False)])
def test_color_can_be_forced(checker: Checker, capsys, choice: str, colored: bool):
    checker.report = Report((ERROR,), (), NOTHING.coverage)
    cli.main(["check", "a.py", "--color", choice])
    assert ("\x1b[" in capsys.readouterr().out) is colored


def test_names_that_the_console_cannot_spell_do_not_end_the_run():
    ran = run("explain", "日本\udc80", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 2
    assert "no rule is called '\\u65e5\\u672c\\udc80'" in ran.stderr


def test_an_interrupt_ends_quietly_with_130(tmp_path: Path):
    script = (
        "import signal, sys, time, types\n"
        "from precisionlint import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a background job
        "def check(*_):\n"
        "    print('started', flush=True)\n"
        "    time.sleep(60)\n"
        "sys.modules['precisionlint.checking'] = types.SimpleNamespace(check=check, Request=lambda *_, **__: None)\n"
        "sys.exit(cli.main(['check', '.']))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_a_reader_that_has_had_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run([*COMMAND, "rules"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_report_that_cannot_be_written_is_said():
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([*COMMAND, "rules"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "precisionlint: cannot write the report: no space left on device\n"


def test_rules_lists_each_rule_once_with_its_severity_its_state_and_what_finds_it():
    ran = run("rules")
    listed = re.findall(r"^  (\S+) +(\S+) +(on|off) +([a-z]+(?:, [a-z]+)*) +(.+)$", ran.stdout, re.MULTILINE)
    on = catalogue.select()
    assert listed == [
        (rule.name, rule.severity, "on" if rule.name in on else "off", ", ".join(rule.found_by), rule.summary)
        for rule in catalogue.load().values()
    ]
    assert re.findall(r"^(\S+)$", ran.stdout, re.MULTILINE) == list(catalogue.families())
    assert (ran.returncode, ran.stderr) == (0, "")


def test_explain_prints_the_page_as_it_stands_where_nobody_looks_at_a_terminal():
    ran = run("explain", "clip-before-unscale")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0] == "# clip-before-unscale"
    assert lines[2].startswith("loss-scaling · error, on · found by check")
    assert "```python wrong" in lines
    assert ".md)" not in ran.stdout
    assert "\x1b" not in ran.stdout


def test_explain_lays_the_page_out_on_a_terminal():
    shown = on_a_terminal("explain", "clip-before-unscale")
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "```" not in plain
    assert "scaler.scale(loss).backward()" in plain
    assert max(len(line) for line in plain.splitlines()) <= 80


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminals_that_want_no_codes_get_none(environment: dict[str, str]):
    assert "\x1b" not in on_a_terminal("explain", "clip-before-unscale", **environment)


def test_a_broken_catalogue_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path):
    (tmp_path / "fam").mkdir()
    (tmp_path / "fam/rule.md").write_text("nothing")
    load: Callable[..., Any] = catalogue.load
    monkeypatch.setattr(catalogue, "load", lambda: load(tmp_path))
    assert cli.main(["rules"]) == 2
    assert capsys.readouterr().err == (
        f"precisionlint: {tmp_path}/fam/rule.md: does not begin with front matter between two lines +++\n"
    )


class Watching:
    """A run with --watch, whose output is taken as it comes."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        # A job in the background has the interrupt ignored, which a program that it starts would inherit.
        script = (
            "import signal, sys\nfrom precisionlint import cli\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\nsys.exit(cli.main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", script, "check", ".", "--watch", "--format", "concise", *arguments]
        self.process = subprocess.Popen(command, cwd=folder, stdout=-1, stderr=subprocess.STDOUT, text=True)

    def round(self) -> list[str]:
        """The lines of a run, without those that only part it from others."""
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("waiting for changes"):
                return lines
            lines.append(line.rstrip("\n"))
        raise AssertionError(lines)


def test_explain_lists_the_rules_of_a_family(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "loss-scaling"]) == 0
    out = capsys.readouterr().out
    assert all(rule.name in out for rule in catalogue.families()["loss-scaling"])
    assert "half-rope" not in out


def test_a_run_that_watches_tells_again_what_a_change_makes_of_it(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "train.py").write_text(CLIP)
    watching = Watching(tmp_path)
    try:
        assert watching.round()[-1] == "found 1 error"
        (tmp_path / "train.py").write_text(SOUND)
        assert watching.round()[-1] == "found nothing"
        (tmp_path / "precisionlint.toml").write_text("selct = 1")
        assert "did you mean 'select'?" in watching.round()[-1]
        (tmp_path / "precisionlint.toml").unlink()
        assert watching.round()[-1] == "found nothing"
        (tmp_path / "new.py").write_text(CLIP)
        assert watching.round()[-1] == "found 1 error"
        watching.process.send_signal(signal.SIGINT)
        assert watching.process.communicate()[0] == ""
        assert watching.process.returncode == 130
    finally:
        watching.process.kill()
        watching.process.wait()


@pytest.mark.parametrize("other", ["--add-ignores", "--show-settings", "--write-baseline=x"])
def test_a_run_that_watches_writes_nothing(other: str, capsys, checker: Checker):
    assert "--watch and --" in usage_error(capsys, "check", ".", "--watch", other)
    assert "standard input is none" in usage_error(capsys, "check", "-", "--watch")


def test_a_long_run_on_a_terminal_shows_how_far_it_is_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    from precisionlint.commands import check_output

    ours, theirs = pty.openpty()
    clock = iter(range(100))
    monkeypatch.setattr(check_output.time, "monotonic", lambda: float(next(clock)))
    with os.fdopen(theirs, "w") as terminal:
        line = check_output.ProgressLine(terminal)
        line("a.py", 0, 4)
        line("sub/ü\x1b.py", 2, 4)
        line.clear()
    shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert (
        shown
        == "\r\x1b[K[" + " " * 20 + "] 0 of 4 files  a.py\r\x1b[K[##########          ] 2 of 4 files  sub/??.py\r\x1b[K"
    )


def test_elsewhere_no_progress_is_shown():
    from io import StringIO

    from precisionlint.commands.check_output import ProgressLine

    stream = StringIO()
    line = ProgressLine(stream)
    line("a.py", 0, 4)
    line.clear()
    assert stream.getvalue() == ""


def test_a_file_that_is_named_and_is_of_no_kind_that_check_reads_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("scaler.step(optimizer)\n")
    done = subprocess.run(
        [*COMMAND, "check", "--no-cache", "notes.txt"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"precisionlint: notes\.txt: nothing that check reads: its name ends in none of .+\.py.+\n", done.stderr
    )


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("ds.json", '{"train_batch_size": 8,\n "optimizer": {', r"ds\.json:3: not JSON: .+"),
        ("run.yaml", "lr: [1e-4,\n", r"run\.yaml:2: not YAML: .+"),
        ("tsconfig.json", '{"strict": true, // as it is\n "include": [],}', None),
        ("values.yaml", "image: {{ .Values.image }}\n", None),  # a template, which is filled in before anybody reads it
        ("options.yml", "name: %scale%_%net%\nlr: 1e-4\n", None),
        ("build.yml", "name: @PROJECT_NAME@\n", None),
        ("odd.yml", "name: %scale\n", r"odd\.yml:1: not YAML: .+"),
        ("setup.sh", "if [", None),
    ],
)
def test_a_configuration_that_is_named_is_parsed_even_if_nothing_in_it_is_of_training(
    tmp_path: Path, name: str, text: str, told: str | None
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    named = run("check", "--no-cache", name, cwd=tmp_path)
    assert named.returncode == (2 if told else 0)
    assert re.fullmatch(rf"precisionlint: {told}\n" if told else "", named.stderr)
    folder = run("check", "--no-cache", ".", cwd=tmp_path)  # where most such files are none of a training run
    assert folder.returncode == 0


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "--faults"], ["verify", "--contracts"]])
def test_without_torch_verify_says_what_it_needs_and_nothing_else(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom importlib import util\nreal = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in ('torch', 'triton') else real(name, *rest)\n"
        f"from precisionlint import cli\nsys.exit(cli.main({arguments}))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    needed = "precisionlint: verify needs torch and triton: pip install 'precisionlint[verify]'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", needed)


@pytest.mark.parametrize("name", ["ds.json", "run.yaml"])
def test_a_configuration_that_is_not_utf_8_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"fp16": {"enabled": true},\n "author": "Andr\xe9"}')
    done = run("check", "--no-cache", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"precisionlint: {name}:2: not UTF-8 (byte 0xe9): save it as UTF-8\n")


def test_a_file_that_is_named_is_parsed_even_if_nothing_in_it_trains(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    (tmp_path / "plain.py").write_text("x = 1\n", encoding="utf-8")
    named = run("check", "--no-cache", "broken.py", "plain.py", cwd=tmp_path)
    assert (named.returncode, named.stderr) == (2, "precisionlint: broken.py:2: syntax error: invalid syntax\n")
    folder = run("check", "--no-cache", ".", cwd=tmp_path)
    assert (folder.returncode, folder.stderr) == (0, "")
    assert run("check", "-", input="def f(:\n", cwd=tmp_path).returncode == 2


def test_an_assumption_about_a_name_that_nothing_has_is_told(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "train.py").write_text("from options import use_amp\nprint(use_amp)\n", encoding="utf-8")
    (tmp_path / "options.py").write_text("use_amp = keep_fp32 = False\n", encoding="utf-8")

    def told(name: str) -> tuple[int, str]:
        done = run("check", "--no-cache", "--assume", f"{name}=True", "train.py", cwd=tmp_path)
        return done.returncode, done.stderr

    assert told("use_amp") == told("cfg.use_amp") == told("keep_fp32") == (0, "")
    message = "precisionlint: nothing in these files is called use_ampp: to assume it changes nothing\n"
    assert told("use_ampp") == (0, message)
    message = "precisionlint: nothing in these files is called amp: to assume it changes nothing\n"
    assert told("amp") == (0, message)  # a part of a name is no name


def test_an_assumption_that_no_undecided_value_of_a_program_meets_is_told(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    program = SOUND.replace("def train(loader):", "use_amp = True\n\n\ndef train(loader, args):")
    program = program.replace('"cuda", dtype', '"cuda", enabled=use_amp and args.fp16, dtype')
    (tmp_path / "train.py").write_text(program, encoding="utf-8")

    def told(*names: str) -> str:
        options = [part for name in names for part in ("--assume", f"{name}=True")]
        done = run("check", "--cache-dir", "kept", *options, "train.py", cwd=tmp_path)
        assert done.returncode == 0
        return done.stderr

    def idle(name: str) -> str:
        return f"precisionlint: no undecided value in these files is called {name}: to assume it changes nothing\n"

    assert told("fp16") == told("args.fp16") == told("args") == ""
    assert told("use_amp") == told("use_amp", "fp16") == idle("use_amp")  # the program says itself what it is
    assert told("use_amp") == idle("use_amp")  # from the cache too
    assert told("torch.amp", "cfg.fp16") == idle("cfg.fp16") + idle("torch.amp")


@pytest.mark.parametrize(
    ("option", "needed"),
    [
        ("--diff-base", "revision of git"),
        ("--config", "file"),
        ("--baseline", "file"),
        ("--write-baseline", "file"),
        ("--cache-dir", "folder"),
        ("--output-file", "file"),
    ],
)
def test_an_option_that_names_nothing_is_wrong_usage(option: str, needed: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOUND, encoding="utf-8")
    done = run("check", "train.py", option, "", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{option} is empty: it needs a {needed}" in done.stderr
