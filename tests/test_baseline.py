"""What is known already: baselines, lines changed since a revision, comments written for what is found now."""

import json
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from programs import CLIP, CLIP_CALL, CLIP_LINE, SOUND

import precisionlint
from precisionlint import baseline, cli
from precisionlint.report.excerpt import Sources

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str = CLIP) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["check", *arguments])
    out, err = capsys.readouterr()
    return code, out + err


# baselines


def test_what_a_baseline_holds_does_not_count(capsys):
    write("a/train.py")
    assert run(capsys, ".", "--write-baseline", "known.json") == (0, "wrote 1 finding to known.json\n")
    code, told = run(capsys, ".", "--baseline", "known.json", "--show-suppressed")
    assert code == 0
    assert f"a/train.py:{CLIP_LINE}:9: baseline: clip-before-unscale" in told
    assert "found nothing; 1 suppressed" in told
    write("b/train.py")
    code, told = run(capsys, ".", "--baseline", "known.json")
    assert code == 1
    assert told.startswith("b/train.py:")


@pytest.mark.parametrize(
    "moved",
    [
        "# one\n# two\n" + CLIP,
        CLIP.replace("        scaler.scale", "        print()\n        scaler.scale"),
        CLIP.replace(CLIP_CALL, f"{CLIP_CALL}\n        print()"),
        CLIP.replace("\n", "\r\n"),
    ],
)
def test_a_finding_that_moved_is_known_still(moved: str, capsys):
    write("train.py")
    run(capsys, "train.py", "--write-baseline", "known.json")
    Path("train.py").write_bytes(moved.encode())
    assert run(capsys, "train.py", "--baseline", "known.json")[0] == 0


def test_a_second_finding_on_an_equal_line_is_new_and_the_first_keeps_its_entry(capsys):
    write("train.py")
    run(capsys, "train.py", "--write-baseline", "known.json")
    again = CLIP.replace(CLIP_CALL, f"{CLIP_CALL}\n        print()\n        {CLIP_CALL}")
    write("train.py", again)
    code, told = run(capsys, "train.py", "--baseline", "known.json")
    assert code == 1
    assert "found 1 error; 1 suppressed" in told
    assert told.startswith(f"train.py:{CLIP_LINE + 2}:")


def test_another_rule_or_another_text_is_new(capsys):
    write("train.py")
    run(capsys, "train.py", "--write-baseline", "known.json")
    write("train.py", CLIP.replace("1.0)", "2.0)"))
    code, told = run(capsys, "train.py", "--baseline", "known.json")
    assert code == 1
    assert f"no longer found, in the baseline: train.py: clip-before-unscale: {CLIP_CALL}" in told


def test_entries_that_fit_nothing_any_more_are_told_for_files_that_were_read_or_are_gone(capsys):
    for name in ("a.py", "b.py", "c.py"):
        write(name)
    run(capsys, ".", "--write-baseline", "known.json")
    write("a.py", SOUND)
    write("b.py", SOUND)
    Path("c.py").unlink()
    code, told = run(capsys, "a.py", "--baseline", "known.json")
    assert code == 0
    assert [line.split(": ")[1] for line in told.splitlines() if line.startswith("no longer found")] == ["a.py", "c.py"]
    code, told = run(capsys, "a.py", "--baseline", "known.json", "--format", "json")
    assert len(json.loads(told)["stale"]) == 2


def test_a_baseline_serves_from_any_folder_and_may_stand_in_the_settings(capsys, monkeypatch, tmp_path):
    write("pkg/sub/train.py")
    run(capsys, "pkg", "--write-baseline", "pkg/known.json")
    write("pkg/precisionlint.toml", 'baseline = "known.json"\n')
    assert run(capsys, ".")[0] == 0
    monkeypatch.chdir(tmp_path / "pkg/sub")
    assert run(capsys, "train.py")[0] == 0
    assert run(capsys, "train.py", "--isolated")[0] == 1
    assert run(capsys, str(tmp_path / "pkg"), "--write-baseline", "new.json")[1].startswith("wrote 1 finding")


def test_a_baseline_is_the_same_whatever_the_order_and_the_folder(capsys, monkeypatch, tmp_path):
    write("b/train.py")
    write("a/train.py")
    run(capsys, "b", "a", "--write-baseline", "one.json")
    monkeypatch.chdir(tmp_path / "a")
    run(capsys, "..", "--write-baseline", "../two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "known.json: cannot be read: no such file or directory"),
        ("{", "known.json: is no baseline: "),
        ("[" * 100_000, "known.json: is no baseline"),
        ("[]", "known.json: is no baseline of version 1; --write-baseline writes one"),
        (
            '{"precisionlint-baseline": 1, "findings": [{}]}',
            "known.json: entry 1 must hold path, rule, text, before, after",
        ),
    ],
)
def test_a_baseline_that_is_none_is_one_line(text: str | None, complaint: str, capsys):
    write("train.py")
    if text is not None:
        write("known.json", text)
    code, told = run(capsys, "train.py", "--baseline", "known.json")
    assert (code, told.count("\n")) == (2, 1)
    assert complaint in told


def test_a_baseline_that_cannot_be_written_leaves_the_old_one(capsys):
    write("train.py")
    Path("known.json").mkdir()
    code, told = run(capsys, "train.py", "--write-baseline", "known.json")
    assert (code, told.count("\n")) == (2, 1)


# changes


def git(*arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository() -> None:
    git("init", "-q", "-b", "main")


TWO = CLIP + CLIP.partition("\n\n\n")[2].replace("def train", "\n\ndef train_again")


@needs_git
@pytest.mark.usefixtures("repository")
def test_only_findings_on_changed_lines_count(capsys):
    write("train.py", TWO)
    git("add", ".")
    git("commit", "-qm", "one")
    assert run(capsys, "train.py")[1].count("error clip") == 2
    assert run(capsys, "train.py", "--diff-base", "HEAD")[0] == 0
    last = TWO.rindex(CLIP_CALL)
    write("train.py", TWO[:last] + TWO[last:].replace("1.0)", "2.0)"))
    code, told = run(capsys, "train.py", "--diff-base", "HEAD")
    assert code == 1
    assert "found 1 error; 1 suppressed" in told
    git("commit", "-qam", "two")
    assert run(capsys, "train.py", "--diff-base", "HEAD")[0] == 0
    assert run(capsys, "train.py", "--diff-base", "HEAD~1")[0] == 1


@needs_git
@pytest.mark.usefixtures("repository")
def test_taking_out_the_line_that_made_it_right_is_a_change(capsys):
    write("train.py", SOUND)
    git("add", ".")
    git("commit", "-qm", "one")
    write("train.py", CLIP)
    assert run(capsys, "train.py", "--diff-base", "HEAD")[0] == 1
    git("commit", "-qam", "two")
    write("train.py", CLIP.replace("import torch.nn.functional as F\n", "import torch.nn.functional as F\n\n"))
    assert run(capsys, "train.py", "--diff-base", "HEAD")[0] == 0


@needs_git
@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("name", ["new.py", "a b/ü.py", 'q"uote.py', "tab\t.py", "++ b.py"])
def test_new_files_and_odd_names_are_changed(name: str, capsys):
    write("train.py")
    git("add", ".")
    git("commit", "-qm", "one")
    write(name)
    assert run(capsys, ".", "--diff-base", "HEAD")[1].count("error clip") == 1
    git("add", ".")
    assert run(capsys, ".", "--diff-base", "HEAD")[1].count("error clip") == 1
    git("commit", "-qm", "two")
    write(name, CLIP.replace("1.0)", "2.0)"))
    assert run(capsys, ".", "--diff-base", "HEAD")[1].count("error clip") == 1


@needs_git
@pytest.mark.usefixtures("repository")
def test_what_the_base_branch_changed_meanwhile_is_not_ours(capsys):
    write("train.py", SOUND)
    write("other.py", SOUND)
    git("add", ".")
    git("commit", "-qm", "one")
    git("switch", "-qc", "topic")
    write("train.py", CLIP)
    git("commit", "-qam", "ours")
    git("switch", "-q", "main")
    write("other.py", SOUND.replace("1.0)", "2.0)"))
    git("commit", "-qam", "theirs")
    git("switch", "-q", "topic")
    assert run(capsys, ".", "--diff-base", "main")[1].count("error clip") == 1


@needs_git
def test_a_folder_without_git_and_an_unknown_revision_are_one_line(capsys):
    write("train.py")
    code, told = run(capsys, "train.py", "--diff-base", "HEAD")
    assert (code, told.count("\n")) == (2, 1)
    assert "not a git repository" in told
    git("init", "-q")
    for revision in ("nonsense", "--output=x"):
        code, told = run(capsys, "train.py", f"--diff-base={revision}")
        assert (code, told) == (2, f"precisionlint: git knows no revision '{revision}'\n")


# comments written


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize(
    "call",
    [
        CLIP_CALL,
        f"{CLIP_CALL}  # as published",
        f"{CLIP_CALL}  # précis",
        f"{CLIP_CALL}  # precisionlint: ignore[tf32-off] kept",
        "nn.utils.clip_grad_norm_(\n            model.parameters(),\n            1.0,\n        )",
        f"norm = \\\n            {CLIP_CALL}",
        f'print("""\n  text\n""", {CLIP_CALL}, """\n  text\n""")',
    ],
)
def test_comments_are_written_where_they_silence(call: str, encoding: str, newline: str, capsys):
    text = ("# coding: latin-1\n" if encoding == "latin-1" else "") + CLIP.replace(CLIP_CALL, call)
    before = text.replace("\n", newline).encode(encoding)
    Path("train.py").write_bytes(before)
    os.chmod("train.py", 0o640)
    assert run(capsys, "train.py", "--add-ignores") == (0, "train.py: 1 finding silenced\n")
    after = Path("train.py").read_bytes()
    assert stat.S_IMODE(os.stat("train.py").st_mode) == 0o640
    assert run(capsys, "train.py", "--ignore", "unused-ignore")[0] == 0
    changed = after.decode(encoding).split(newline)
    kept = [line for line in before.decode(encoding).split(newline) if line in changed]
    assert len(kept) >= before.decode(encoding).count(newline)
    assert (b"\r" in after) == (newline == "\r\n")
    assert run(capsys, "train.py", "--add-ignores")[1] == "nothing to silence\n"
    assert Path("train.py").read_bytes() == after


def test_a_reason_is_written_with_them(capsys):
    write("train.py")
    assert run(capsys, ".", "--add-ignores", "--reason", "as published")[0] == 0
    assert f"{CLIP_CALL}  # precisionlint: ignore[clip-before-unscale] as published\n" in Path("train.py").read_text()
    assert [each.reason for each in precisionlint.check(".", require_reason=True).suppressed] == ["as published"]


@pytest.mark.parametrize("reason", ["two\nlines", "a # b"])
def test_a_reason_that_would_break_the_comment_is_refused(reason: str, capsys):
    write("train.py")
    assert run(capsys, ".", "--add-ignores", "--reason", reason)[0] == 2
    assert Path("train.py").read_text() == CLIP


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_cannot_be_written_is_said_and_stays(capsys):
    write("ro/train.py")
    os.chmod("ro", 0o555)
    code, told = run(capsys, ".", "--add-ignores")
    os.chmod("ro", 0o755)
    assert (code, Path("ro/train.py").read_text()) == (2, CLIP)
    assert "cannot be written: permission denied" in told


def test_a_disk_that_is_full_leaves_the_file_as_it_was(monkeypatch, capsys):
    write("train.py")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, told = run(capsys, "train.py", "--add-ignores")
    assert (code, Path("train.py").read_text(), os.listdir()) == (2, CLIP, ["train.py"])
    assert "no space left on device" in told
    assert "nothing to silence" not in told


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_baseline_goes_into_a_pipe_that_stays_one_and_a_new_file_has_the_usual_permissions(tmp_path: Path):
    target = tmp_path / "pipe"
    os.mkfifo(target)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(target.read_text()))
    reader.start()
    baseline.write(target, [], Sources())
    reader.join()
    assert (json.loads(read[0])["findings"], target.is_fifo()) == ([], True)
    new, usual = tmp_path / "new.json", tmp_path / "usual"
    baseline.write(new, [], Sources())
    usual.touch()
    assert new.stat().st_mode == usual.stat().st_mode
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.json", "pipe", "usual"]
