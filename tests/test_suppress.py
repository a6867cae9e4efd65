"""Comments that silence findings: where they speak, what they name, and what is said of those that silence nothing."""

import json
from pathlib import Path

import pytest
from programs import CLIP, CLIP_CALL, CLIP_LINE, SOUND

import precisionlint
from precisionlint import cli
from precisionlint.findings import GaveUp, Report
from precisionlint.reader import FileResult, Totals

COMMENT = "# precisionlint: ignore[clip-before-unscale]"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(text: str, **options: object) -> Report:
    Path("train.py").write_text(text, encoding="utf-8")
    return precisionlint.check("train.py", **options)  # type: ignore[arg-type]


def found(report: Report) -> list[tuple[int, str]]:
    return [(each.place.line, each.rule) for each in report.findings]


def on_clip(comment: str, text: str = CLIP) -> str:
    return text.replace(CLIP_CALL, f"{CLIP_CALL}  {comment}")


@pytest.mark.parametrize(
    "comment",
    [
        COMMENT,
        "#precisionlint:ignore[clip-before-unscale]",
        "# precisionlint: ignore[clip-before-unscale] because",
        "# precisionlint: ignore[ tf32-off ,clip-before-unscale, ]",
        "# precisionlint: ignore[loss-scaling]",
        "# precisionlint: ignore[all]",
        "# noqa: E501  # precisionlint: ignore[clip-before-unscale]",
        f"{COMMENT}  # noqa: E501",
        "# PRECISIONLINT: IGNORE[CLIP-BEFORE-UNSCALE] as all comments here are written",
        "# PrecisionLint : Ignore[clip-before-unscale]",
        "# precisionlint: ignore[tf32-off]  # precisionlint: ignore[clip-before-unscale]",
    ],
)
def test_a_comment_on_the_line_silences_what_it_names(comment: str):
    report = checked(on_clip(comment), ignore=["unused-ignore"])
    assert found(report) == []
    assert [(each.finding.rule, each.by) for each in report.suppressed] == [("clip-before-unscale", "comment")]
    assert report.exit_code == 0


@pytest.mark.parametrize(
    "comment",
    [
        "# precisionlint: ignore[tf32-off]",
        "# precisionlint: ignore",
        "# precisionlint: ignore[]",
        "# precisionlint: ignored[clip-before-unscale]",
        "# noqa",
        "# precisionlint ignore[clip-before-unscale]",
        "# precision-lint: ignore[clip-before-unscale]",
        "# precisionlint: ignore clip-before-unscale",
    ],
)
def test_other_comments_silence_nothing(comment: str):
    assert (CLIP_LINE, "clip-before-unscale") in found(checked(on_clip(comment)))


SEVERAL_LINES = """\
nn.utils.clip_grad_norm_(  # first
            model.parameters(),
            1.0,
        )  # last"""


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_comment_may_stand_where_the_statement_begins_or_ends(at: str):
    text = CLIP.replace(CLIP_CALL, SEVERAL_LINES.replace(f"# {at}", COMMENT))
    assert found(checked(text)) == []


def test_a_comment_on_the_first_line_speaks_for_findings_further_down_in_the_statement():
    text = CLIP.replace(CLIP_CALL, f"norms = [  {COMMENT}\n            {CLIP_CALL},\n        ]")
    assert found(checked(text)) == []
    assert found(checked(text.replace(COMMENT, ""))) == [(CLIP_LINE + 1, "clip-before-unscale")]


def test_a_comment_on_a_line_of_its_own_speaks_for_the_statement_below():
    above = CLIP.replace(CLIP_CALL, f"{COMMENT} as published\n        # and more\n\n        {CLIP_CALL}")
    report = checked(above)
    assert found(report) == []
    assert report.suppressed[0].reason == "as published"
    assert checked(CLIP.replace(CLIP_CALL, f"{COMMENT}\n        print()\n        {CLIP_CALL}")).exit_code == 1


@pytest.mark.parametrize("header", ["def train(loader):", "    for x, y in loader:"])
def test_a_comment_on_a_heading_does_not_speak_for_the_body(header: str):
    report = checked(CLIP.replace(header, f"{header}  {COMMENT}"))
    assert (CLIP_LINE, "clip-before-unscale") in found(report)


@pytest.mark.parametrize("before", ["", "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n\n", '"""A docstring."""\n\n'])
def test_a_comment_at_the_top_speaks_for_the_whole_file(before: str):
    comment = "# precisionlint: ignore-file[clip-before-unscale] kept as published\n"
    report = checked(before + comment + CLIP)
    assert found(report) == []
    assert report.suppressed[0].reason == "kept as published"


def test_what_a_string_holds_is_no_comment():
    text = CLIP.replace(CLIP_CALL, f'print("{COMMENT}"); {CLIP_CALL}')
    assert found(checked(text)) == [(CLIP_LINE, "clip-before-unscale")]
    text = CLIP.replace(CLIP_CALL, f"print('''\n{COMMENT}\n'''); {CLIP_CALL}")
    assert found(checked(text)) == [(CLIP_LINE + 2, "clip-before-unscale")]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_newlines_and_encodings_change_nothing(newline: str, encoding: str):
    if (newline, encoding) == ("\r", "latin-1"):
        pytest.skip("Python itself looks for the encoding in what it takes for the first line")
    text = ("# coding: latin-1\n" if encoding == "latin-1" else "") + on_clip(f"{COMMENT} für später")
    Path("train.py").write_bytes(text.replace("\n", newline).encode(encoding))
    report = precisionlint.check("train.py")
    assert (report.findings, report.errors) == ((), ())
    assert report.suppressed[0].reason == "für später"


def unused(text: str, **options: object) -> list[tuple[int, int, str]]:
    report = checked(text, **options)
    return [(f.place.line, f.place.column, f.message) for f in report.findings if f.rule == "unused-ignore"]


def test_a_comment_that_silences_nothing_is_a_finding_at_the_name():
    text = on_clip("# precisionlint: ignore[clip-before-unscale, double-unscale]")
    column = text.splitlines()[CLIP_LINE - 1].index("double-unscale") + 1
    assert unused(text) == [(CLIP_LINE, column, "silences nothing: check finds no double-unscale here")]
    assert unused(on_clip(COMMENT)) == []
    assert len(unused(on_clip(COMMENT, SOUND))) == 1
    assert len(unused(f"# precisionlint: ignore-file[clip-before-unscale]\n{SOUND}")) == 1


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("ignore[clip-befor-unscale]", "did you mean 'clip-before-unscale'?"),
        ("ignore", "it names no rule, as ignore[clip-before-unscale] does"),
        ("ignore[]", "it names no rule"),
        ("ignore clip-before-unscale", "a rule stands in brackets, ignore[clip-before-unscale]"),
        ("ignore all, as published", "a rule stands in brackets, ignore[all]"),
        ("ignore this line", "it names no rule"),
        ("skip[clip-before-unscale]", "'skip' is neither ignore[…] nor ignore-file[…]"),
        ("ignore-file[clip-before-unscale]", "ignore-file counts only above the file's first statement"),
    ],
)
def test_a_comment_that_cannot_silence_anything_says_why(comment: str, said: str):
    ((line, _, message),) = unused(on_clip(f"# precisionlint: {comment}"))
    assert line == CLIP_LINE
    assert said in message


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("# precision-lint: ignore[clip-before-unscale]", "must begin with '# precisionlint: ignore', not '# precision-lint:'"),
        ("# Precision_Lint: ignore-file[all]", "must begin with '# precisionlint: ignore-file', not '# precision_lint:'"),
        ("# precisionlint ignore[clip-before-unscale]", "must begin with '# precisionlint: ignore', not '# precisionlint'"),
        ("# precisionlint-ignore: clip-before-unscale", "must begin with '# precisionlint: ignore', not '# precisionlint-'"),
        ("# precisionlint ignores the clip below", ""),
        ("# precision-lint: a note", ""),
    ],
)  # fmt: skip
def test_a_comment_that_was_meant_to_silence_something_says_what_it_lacks(comment: str, said: str):
    messages = [message for _, _, message in unused(on_clip(comment, SOUND))]
    assert [said in message for message in messages] == ([True] if said else [])


@pytest.mark.parametrize(
    "options",
    [
        {"ignore": ["clip-before-unscale"]},
        {"select": ["unused-ignore"]},
        {"assume": {"use_amp": "True"}},
        {"per_file_ignores": {"train.py": ["loss-scaling"]}},
        {"ignore": ["unused-ignore"]},
    ],
)
def test_a_comment_is_not_judged_where_its_rule_was_not_looked_for(options: dict[str, object]):
    assert unused(on_clip(COMMENT, SOUND), **options) == []


@pytest.mark.parametrize("name", ["lost-updates", "scale-read-on-host", "all", "master-weights"])
def test_names_that_this_run_cannot_judge_are_left_alone(name: str):
    assert unused(on_clip(f"# precisionlint: ignore[{name}]", SOUND), ignore=["bf16-only-weights"]) == []


def test_comments_are_judged_in_files_that_hold_no_training_too():
    assert len(unused(f"x = 1  {COMMENT}\n")) == 1
    report = checked(f"x = (  {COMMENT}\n")
    assert report.findings == ()
    assert checked(f"import torch, torch.optim.Adam  {COMMENT}\n)").findings == ()


def test_unused_comments_can_be_silenced_themselves():
    assert unused(on_clip("# precisionlint: ignore[double-unscale, unused-ignore]", CLIP)) == []
    text = f"# precisionlint: ignore-file[unused-ignore]\n{on_clip(COMMENT, SOUND)}"
    assert found(checked(text)) == []


def test_a_reason_can_be_required():
    text = on_clip(COMMENT)
    assert found(checked(text, require_reason=True)) == [(CLIP_LINE, "ignore-without-reason")]
    assert found(checked(on_clip(f"{COMMENT} why"), require_reason=True)) == []
    assert found(checked(text)) == []
    Path("pyproject.toml").write_text("[tool.precisionlint]\nrequire-reason = true\n")
    assert found(checked(text)) == [(CLIP_LINE, "ignore-without-reason")]


def test_what_is_silenced_is_counted_and_shown_on_request(capsys):
    Path("train.py").write_text(on_clip(f"{COMMENT} as published"))
    assert cli.main(["check", "train.py"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("found nothing; 1 suppressed (--show-suppressed lists them)\n")
    assert cli.main(["check", "train.py", "--show-suppressed"]) == 0
    assert f"train.py:{CLIP_LINE}:9: comment: clip-before-unscale: as published\n" in capsys.readouterr().out
    assert cli.main(["check", "train.py", "--format", "json"]) == 0
    (silenced,) = json.loads(capsys.readouterr().out)["suppressed"]
    assert (silenced["rule"], silenced["suppressed_by"], silenced["reason"]) == (
        "clip-before-unscale",
        "comment",
        "as published",
    )


@pytest.mark.parametrize(
    "reason", ["too many paths to follow", "more paths at once than are followed", "nested too deeply to be followed"]
)
def test_comments_are_not_judged_in_a_file_that_was_not_read_to_its_end(reason: str):
    source = Path(precisionlint.__file__).parent / "source"
    assert any(reason in path.read_text(encoding="utf-8") for path in source.glob("*.py"))
    assert not FileResult(totals=Totals(gave_up=(GaveUp("train.py", 1, reason),))).complete
    assert FileResult(totals=Totals(gave_up=(GaveUp("train.py", 1, "a call that cannot be read"),))).complete
