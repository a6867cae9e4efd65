"""Hard inputs around a run: many findings, large files, folders that cannot be read, terminals that close."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import CLIP, CLIP_CALL

import precisionlint
from precisionlint import cli

COMMAND = [sys.executable, "-m", "precisionlint", "check", "."]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_thousands_of_comments_and_findings_in_one_file(capsys):
    unused = "x = 1  # precisionlint: ignore[clip-before-unscale]\n" * 4_000
    Path("train.py").write_text(CLIP + unused)
    report = precisionlint.check(".")
    assert len(report.findings) == 4_001
    for form in ("text", "sarif", "gitlab", "junit", "markdown", "github"):
        assert cli.main(["check", ".", "--format", f"{form}:out.{form}"]) == 1
    assert len(json.loads(Path("out.gitlab").read_text())) == 4_001
    assert cli.main(["check", ".", "--write-baseline", "known.json"]) == 0
    assert cli.main(["check", ".", "--baseline", "known.json"]) == 0


def test_a_file_of_very_many_lines():
    Path("train.py").write_text(CLIP + "x = 1\n" * 100_000)
    assert [each.rule for each in precisionlint.check(".").findings] == ["clip-before-unscale"]


@pytest.mark.parametrize(
    "data", [CLIP.encode() + b"\x00", CLIP.encode() + b"\xff\xfe", CLIP.encode().replace(b"\n", b"\r")]
)
def test_odd_bytes_are_an_error_or_no_matter_and_never_a_traceback(data: bytes, capsys):
    Path("train.py").write_bytes(data)
    code = cli.main(["check", "."])
    told = capsys.readouterr()
    assert code in (1, 2)
    assert "Traceback" not in told.err
    assert cli.main(["check", ".", "--add-ignores"]) in (0, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_said(capsys):
    Path("closed").mkdir()
    os.chmod("closed", 0)
    Path("train.py").write_text(CLIP)
    code = cli.main(["check", "."])
    os.chmod("closed", 0o755)
    assert code == 2
    assert "closed: permission denied" in capsys.readouterr().err


def test_a_reader_that_leaves_early_ends_the_run_quietly():
    for number in range(30):
        Path(f"train{number}.py").write_text(CLIP)
    with subprocess.Popen([*COMMAND, "--format", "json"], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == "{"
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (1, "")


def test_a_file_that_goes_while_the_run_is_under_way_is_said(monkeypatch: pytest.MonkeyPatch):
    from precisionlint import files

    Path("train.py").write_text(CLIP)
    real = files.find

    def then_gone(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        Path("train.py").unlink()
        return found

    monkeypatch.setattr(files, "find", then_gone)
    (error,) = precisionlint.check(".").errors
    assert (error.path, error.message) == ("train.py", "cannot be read: No such file or directory")


def test_a_name_with_everything_in_it_is_read_and_told(capsys):
    name = "a \"b\" 'c' \n\t\x1b[31m %0A ::x:: é\udc80.py"
    Path(name).write_text(CLIP)
    for form in ("text", "concise", "json", "jsonl", "sarif", "github", "gitlab", "junit", "markdown"):
        assert cli.main(["check", ".", "--format", form]) == 1
        told = capsys.readouterr().out
        assert "\x1b" not in told
    for _ in range(2):  # read, then from the cache
        time.sleep(0.1)
        (finding,) = precisionlint.check(".", cache=True).findings
        assert finding.place.path == name
    assert cli.main(["check", ".", "--add-ignores"]) == 0
    assert f"{CLIP_CALL}  # precisionlint: ignore" in Path(name).read_text()
    Path(name).write_text(CLIP)
    assert cli.main(["check", ".", "--write-baseline", "known.json"]) == 0
    assert cli.main(["check", ".", "--baseline", "known.json"]) == 0
    (finding,) = precisionlint.check(".", jobs=2).findings
    assert finding.place.path == name


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads it")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("type Batch = list[int]", "the type statement needs Python 3.12"),
        ("def step[T](x: T): ...", "type parameters need Python 3.12"),
        ("class Model[T]: ...", "type parameters need Python 3.12"),
        ('print(f"{x["loss"]}")', "Python 3.12 reads f-strings that older ones do not"),
        ("print(f\"{'\\n'.join(x)}\")", "Python 3.12 reads f-strings that older ones do not"),
    ],
)
def test_syntax_of_a_newer_python_is_told_as_such(line: str, said: str):
    Path("train.py").write_text(f"import torch\n{line}\n")
    (error,) = precisionlint.check("train.py").errors
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert error.line == 2
    assert error.message.endswith(f"; {said}, and this is {mine}: run precisionlint with a newer one")


def test_a_syntax_error_of_every_python_is_told_as_it_is():
    Path("train.py").write_text("import torch\nx = f(\n")
    (error,) = precisionlint.check("train.py").errors
    assert error.message == "syntax error: '(' was never closed"


@pytest.mark.parametrize("module", ["a" * 300, ".".join(["a"] * 3000)])
def test_names_of_modules_that_no_file_can_have_cost_nothing(module: str, tmp_path: Path, capsys):
    program = tmp_path / "train.py"
    program.write_text(f"import {module}\n{CLIP}")
    assert cli.main(["check", "--no-cache", "--format", "concise", str(program)]) == 1
    told = capsys.readouterr()
    assert "clip-before-unscale" in told.out
    assert "internal error" not in told.err


def test_a_path_of_thousands_of_folders_is_one_line(capsys):
    assert cli.main(["check", "--no-cache", "a/" * 3000 + "x.py"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_current_folder_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["check", "."]) == 2
    assert "no longer there" in capsys.readouterr().err


def test_a_long_run_of_letters_in_a_file_beside_is_gone_through_once(tmp_path: Path) -> None:
    """Patterns of names began at each of its letters: half a megabyte took longer than anybody waits."""
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(8))\n\n    def forward(self, x):\n"
        "        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)\n",
        encoding="utf-8",
    )
    (tmp_path / "train.py").write_text(
        "import torch\nfrom model import Model\n\nmodel = Model()\nmodel.half()\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-5)\n"
        "for x in torch.randn(4, 8):\n    model(x.half()).sum().backward()\n    optimizer.step()\n",
        encoding="utf-8",
    )
    data = "0123456789abcdef" * 32_768
    (tmp_path / "blob.py").write_text(
        f'import torch\n\nDATA = "{data}"\nstate = torch.load(DATA).half()\n', encoding="utf-8"
    )
    report = precisionlint.check([str(tmp_path)])
    assert "norm-without-upcast" in {each.rule for each in report.findings}
    assert report.errors == ()


@pytest.mark.skipif(os.name == "nt", reason="a shell closes it")
def test_standard_input_that_is_closed_is_one_clear_line(tmp_path: Path) -> None:
    command = f"{sys.executable} -m precisionlint check - <&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "standard input is closed" in done.stderr
    assert "Traceback" not in done.stderr
