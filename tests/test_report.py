"""Reports as people and programs get them: whole outputs, hostile source text, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from precisionlint.findings import Coverage, FileError, Finding, GaveUp, Place, Report, Step
from precisionlint.report import json as as_json
from precisionlint.report import text
from precisionlint.report.excerpt import excerpt
from precisionlint.report.outputs import Style

SOURCE = """\
scaler.scale(loss).backward()
if clip:
\tclip_grad_norm_(model.parameters(), 1.0)
"""
CLIP = Finding(
    rule="clip-before-unscale",
    family="loss-scaling",
    severity="error",
    confidence="certain",
    message="clip_grad_norm_ sees gradients of 'optim' still scaled by 'scaler'",
    place=Place("train.py", 3, 2, 3, 42),
    when="args.fp16 is set",
    trace=(
        Step(Place("train.py", 1, 1, 1, 30), "'scaler' scales the loss"),
        Step(Place("train.py", 3, 2, 3, 42), "clipped here"),
    ),
)
TF32 = Finding(
    rule="tf32-off",
    family="matmul-precision",
    severity="info",
    confidence="likely",
    message="fp32 products run without TF32",
    place=Place("train.py", 1, 1, 1, 7),
)
COVERAGE = Coverage(
    files=12,
    read=3,
    programs=2,
    loops=3,
    optimizers=2,
    scalers=1,
    recipes=("fp16 autocast + GradScaler, AdamW on fp32 weights, clip 1.0",),
    gave_up=(GaveUp("train.py", 7, "a call of an unknown registry"), GaveUp("util.py", 9, "too many paths")),
)


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOURCE, encoding="utf-8")


def told(report: Report, **options: bool) -> str:
    return "\n".join(text.render(report, Style(**options)))


def test_text_shows_place_line_path_and_summary():
    assert told(Report((CLIP, TF32), (), COVERAGE)) == (
        """\
train.py:3:2: error clip-before-unscale: clip_grad_norm_ sees gradients of 'optim' still scaled by 'scaler' \
(when args.fp16 is set)
3 |     clip_grad_norm_(model.parameters(), 1.0)
  |     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  1. train.py:1: 'scaler' scales the loss
  2. train.py:3: clipped here

train.py:1:1: info tf32-off [likely]: fp32 products run without TF32
1 | scaler.scale(loss).backward()
  | ^^^^^^

found 1 error, 1 info
recipe: fp16 autocast + GradScaler, AdamW on fp32 weights, clip 1.0
read 3 of 12 files: 2 programs, 3 loops, 2 optimizers, 1 scaler; gave up on 2 places (--verbose names them)"""
    )


def test_verbose_names_each_place_where_reading_gave_up():
    assert told(Report((), (), COVERAGE), verbose=True).endswith(
        """; gave up on 2 places:
  train.py:7: a call of an unknown registry
  util.py:9: too many paths"""
    )


@pytest.mark.parametrize(
    ("coverage", "expected"),
    [
        (Coverage(1, 1, 1, 1, 1, 1), "read 1 of 1 file: 1 program, 1 loop, 1 optimizer, 1 scaler"),
        (Coverage(9, 0, 0, 0, 0, 0), "looked at 9 files: no training program and no settings of precision"),
        (Coverage(2, 1, 0, 0, 0, 0), "read 1 of 2 files: no training program"),
        (Coverage(2, 2, 1, 0, 3, 0), "read 2 of 2 files: 1 program, 3 optimizers"),
        (
            Coverage(1, 1, 1, 0, 0, 0, (), (GaveUp("a.py", 1, "x"),)),
            "read 1 of 1 file: 1 program; gave up on 1 place (--verbose names it)",
        ),
    ],
)
def test_the_summary_counts_in_words_that_agree(coverage: Coverage, expected: str):
    assert told(Report((), (), coverage)) == f"found nothing\n{expected}"


@pytest.mark.parametrize("errors", [(), (FileError("bad.py", 3, "invalid syntax"),)])
def test_where_nothing_could_be_read_no_reach_is_claimed(errors: tuple[FileError, ...]):
    files = len(errors)
    assert told(Report((), errors, Coverage(files, 0, 0, 0, 0, 0))).count("\n") == 0


def test_files_that_could_not_be_read_keep_silence_from_looking_like_success():
    errors = (FileError("bad.py", 3, "invalid syntax"), FileError("gone.py", None, "no such file or folder"))
    assert told(Report((), errors, COVERAGE)).startswith("found nothing; could not read 2 files\n")
    assert [text.error_line(error) for error in errors] == [
        "precisionlint: bad.py:3: invalid syntax",
        "precisionlint: gone.py: no such file or folder",
    ]


def test_colours_change_nothing_but_the_codes():
    report = Report((CLIP, TF32), (), COVERAGE)
    colored = told(report, color=True)
    assert "\x1b[1;31merror\x1b[0m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == told(report)


@pytest.mark.parametrize("path", ["gone.py", ".", "cookie.py", "latin.py"])
def test_a_file_that_changed_or_cannot_be_read_any_more_costs_only_the_excerpt(path: str):
    Path("cookie.py").write_bytes(b"# coding: nonsense\n\n\n")
    Path("latin.py").write_bytes(b"\n\n\xff\n")
    finding = Finding("r", "f", "error", "certain", "m", Place(path, 3, 1, 3, 2))
    assert told(Report((finding,), (), COVERAGE)).startswith(f"{path}:3:1: error r: m\n\nfound 1 error")
    beyond = Finding("r", "f", "error", "certain", "m", Place("train.py", 99, 1, 99, 2))
    assert told(Report((beyond,), (), COVERAGE)).startswith("train.py:99:1: error r: m\n\n")


def test_lines_are_counted_as_python_counts_them():
    Path("odd.py").write_bytes("# coding: latin-1\r\na = '\x0c\x85é'\r\rb = 1\n".encode("latin-1"))
    finding = Finding("r", "f", "error", "certain", "m", Place("odd.py", 4, 1, 4, 2))
    assert "4 | b = 1\n  | ^\n" in told(Report((finding,), (), COVERAGE))


HOSTILE = "\x1b[31m\x07\x9b2J\u202e\u2066[bold red]\udc80\x00"


def test_text_from_the_source_cannot_steer_the_terminal():
    Path("train.py").write_text(f"x = '{HOSTILE[:-2]}'\n", encoding="utf-8")
    place = Place(f"train.py{HOSTILE}", 1, 1, 1, 2)
    finding = Finding("r", "f", "error", "certain", HOSTILE, place, HOSTILE, (Step(place, HOSTILE),))
    coverage = Coverage(1, 1, 1, 1, 1, 1, (HOSTILE,), (GaveUp(HOSTILE, 1, HOSTILE),))
    shown = Finding("r", "f", "error", "certain", "m", Place("train.py", 1, 1, 1, 2))
    output = told(Report((finding, shown), (), coverage), verbose=True)
    output += text.error_line(FileError(HOSTILE, 1, f"two\nlines{HOSTILE}"))
    assert all(each.isprintable() or each == "\n" for each in output)
    assert output.count("[bold red]") == 11
    assert "two\N{REPLACEMENT CHARACTER}lines" in output


@pytest.mark.parametrize(
    ("line", "span", "text", "marked"),
    [
        ("a = clip(x)", (5, 12), "a = clip(x)", "clip(x)"),
        ("\tclip(x)", (2, 9), "    clip(x)", "clip(x)"),
        ("日本 = clip(x)", (6, 13), "日本 = clip(x)", "clip(x)"),
        ("e\u0301 = clip(x)", (6, 13), "e\u0301 = clip(x)", "clip(x)"),
        ("clip(x)", (1, 1), "clip(x)", "c"),
        ("clip", (40, 50), "clip", ""),
    ],
)
def test_the_carets_stand_under_the_span(line: str, span: tuple[int, int], text: str, marked: str):
    wide = {"日": 2, "本": 2, "\u0301": 0}
    found = excerpt(line, Place("p", 1, span[0], 1, span[1]))
    cells = [each for each in found.text for _ in range(wide.get(each, 1))]
    assert found.text == text
    assert "".join(cells[found.offset : found.offset + found.length]) == marked
    assert found.length >= 1


def test_of_a_span_over_several_lines_the_first_is_marked_to_its_end():
    found = excerpt("    clip(x,  ", Place("p", 1, 5, 3, 2))
    assert (found.offset, found.length) == (4, len("clip(x,"))


@pytest.mark.parametrize("column", [1, 50, 3000, 9990])
def test_a_very_long_line_is_cut_around_the_span(column: int):
    line = "x" * (column - 1) + "clip" + "x" * (10000 - column)
    found = excerpt(line, Place("p", 1, column, 1, column + 4))
    assert len(found.text) <= 122
    assert found.text[found.offset : found.offset + found.length] == "clip"


def test_a_very_long_span_is_marked_as_far_as_it_is_shown():
    found = excerpt("clip(" + "x" * 5000, Place("p", 1, 1, 1, 5006))
    assert found.offset + found.length < len(found.text) <= 122


def test_json_is_the_schema_that_programs_rely_on():
    report = Report((CLIP,), (FileError("bad.py", 3, "invalid syntax"), FileError("gone.py", None, "gone")), COVERAGE)
    assert json.loads(as_json.dumps(report)) == {
        "schema": 1,
        "findings": [
            {
                "rule": "clip-before-unscale",
                "family": "loss-scaling",
                "severity": "error",
                "confidence": "certain",
                "message": "clip_grad_norm_ sees gradients of 'optim' still scaled by 'scaler'",
                "when": "args.fp16 is set",
                "path": "train.py",
                "line": 3,
                "column": 2,
                "end_line": 3,
                "end_column": 42,
                "cell": 0,
                "trace": [
                    {"path": "train.py", "line": 1, "cell": 0, "message": "'scaler' scales the loss"},
                    {"path": "train.py", "line": 3, "cell": 0, "message": "clipped here"},
                ],
                "fix": None,
            }
        ],
        "suppressed": [],
        "stale": [],
        "errors": [
            {"path": "bad.py", "line": 3, "message": "invalid syntax"},
            {"path": "gone.py", "line": None, "message": "gone"},
        ],
        "coverage": {
            "files": 12,
            "read": 3,
            "programs": 2,
            "loops": 3,
            "optimizers": 2,
            "scalers": 1,
            "recipes": ["fp16 autocast + GradScaler, AdamW on fp32 weights, clip 1.0"],
            "gave_up": [
                {"path": "train.py", "line": 7, "what": "a call of an unknown registry"},
                {"path": "util.py", "line": 9, "what": "too many paths"},
            ],
        },
    }


def test_json_is_ascii_whatever_the_names_hold():
    finding = Finding("r", "f", "error", "certain", "é", Place("\udc80é.py", 1, 1, 1, 2))
    assert as_json.dumps(Report((finding,), (), COVERAGE)).isascii()


@pytest.mark.parametrize(
    ("findings", "errors", "code"),
    [
        ((), (), 0),
        ((TF32,), (), 0),
        ((TF32, CLIP), (), 1),
        ((), (FileError("a", None, "m"),), 2),
        ((CLIP,), (FileError("a", None, "m"),), 2),
    ],
)
def test_exit_codes(findings: tuple[Finding, ...], errors: tuple[FileError, ...], code: int):
    assert Report(findings, errors, COVERAGE).exit_code == code


def test_a_warning_fails_a_run():
    warning = Finding("r", "f", "warning", "likely", "m", Place("p", 1, 1, 1, 2))
    assert Report((warning,), (), COVERAGE).exit_code == 1


def test_reports_are_told_without_rich_or_libcst():
    script = (
        "import sys, precisionlint.cli, precisionlint.report.text, precisionlint.report.json\n"
        "print({'rich', 'libcst', 'torch', 'importlib.metadata'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


@pytest.mark.parametrize(("more", "told_as"), [(1, "and 1 more recipe\n"), (2, "and 2 more recipes\n")])
def test_recipes_past_the_first_are_counted(more: int, told_as: str):
    recipes = tuple(f"no autocast, SGD at {number}" for number in range(text.RECIPES + more))
    assert told_as in told(Report((), (), Coverage(1, 1, 1, 1, 1, 0, recipes)))
