"""Fixes: what they change is the fault and nothing else, in every file that holds one, and what cannot be fixed stays as it is."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from programs import CLIP as CLIPPED
from programs import CLIP_CALL

from precisionlint import catalogue, checking
from precisionlint.cli import main
from precisionlint.config import Configuration
from precisionlint.findings import Finding, Report
from precisionlint.fixing import fix
from precisionlint.source.requirements import version, versions

ROOT = Path(__file__).parent.parent
RULES = catalogue.load()
PROGRAMS = {
    f"{rule.name}-{example.line}": example.code.encode()
    for rule in RULES.values()
    for example in catalogue.examples(rule)
    if example.kind == "wrong" and example.language == "python"
} | {path.stem: path.read_bytes() for path in sorted((ROOT / "fixtures/broken").glob("*.py"))}
"""Name -> a program with a fault: the wrong examples of all pages, and the broken fixtures of one file."""

ARANGE = b"import torch\n\n\ndef steps(n):\n    return torch.arange(n, dtype=torch.bfloat16)\n"
AUTOCAST = b"import torch\n\n\ndef run(model, x):\n    with torch.cuda.amp.autocast():\n        return model(x)\n"


HOME = tempfile.TemporaryDirectory(prefix="precisionlint-fixes-")


def program(name: str, data: bytes) -> str:
    """The path of a program, in a folder of its own: what it needs to show of itself is looked up on the disk."""
    path = Path(HOME.name, name, f"{name}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return str(path)


@cache
def check(name: str, data: bytes) -> Report:
    """What is found in a text that stands for a file."""
    rules = Configuration({"select": ("all",)}, isolated=True)
    return checking.check(checking.Request((name,), rules, texts={name: data}))


def fixed(name: str, data: bytes, *, unsafe: bool) -> bytes:
    changes, errors = fix(check(name, data), check, unsafe=unsafe)
    assert not errors
    return changes[name].after if name in changes else data


@cache
def offered() -> dict[str, set[str]]:
    """Rule -> the kinds of fixes that are offered for it in any of the programs."""
    kinds: dict[str, set[str]] = {}
    for name, data in PROGRAMS.items():
        for finding in check(program(name, data), data).replacements:
            assert finding.fix is not None
            kinds.setdefault(finding.rule, set()).add("safe" if finding.fix.safe else "unsafe")
    return kinds


def rules_of(findings: "tuple[Finding, ...]") -> list[str]:
    return sorted(finding.rule for finding in findings)


def told_twice(rules: list[str]) -> list[str]:
    """Rules found, without those about a comment that goes where another finding about it is fixed."""
    return [rule for rule in rules if rule != "ignore-without-reason"]


def possible(findings: "tuple[Finding, ...]", rule: str) -> int:
    return sum(finding.rule == rule and finding.confidence == "possible" for finding in findings)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_fixed_is_gone_and_nothing_new_is_found(name: str):
    path, data = program(name, PROGRAMS[name]), PROGRAMS[name]
    before = check(path, data)
    after_data = fixed(path, data, unsafe=True)
    if not before.replacements:
        assert after_data == data
        return
    ast.parse(after_data)
    after = check(path, after_data)
    assert not after.replacements, "a fix that can be made is left"
    left = tuple(finding for finding in before.findings if finding not in before.replacements)
    gone = Counter(told_twice(rules_of(left)))
    gone.subtract(told_twice(rules_of(after.findings)))
    # What is only possible may have come of what is fixed.
    assert all(0 <= gone[rule] <= possible(left, rule) for rule in gone), after_data.decode()
    assert fixed(path, after_data, unsafe=True) == after_data


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_leave_for_others_only_safe_fixes_are_made(name: str):
    path, data = program(name, PROGRAMS[name]), PROGRAMS[name]
    before = check(path, data)
    kept = [each for each in before.findings if each not in before.replacements or not each.fix or not each.fix.safe]
    after = check(path, fixed(path, data, unsafe=False))
    assert told_twice(rules_of(after.findings)) == told_twice(rules_of(tuple(kept)))


@pytest.mark.parametrize("rule", RULES)
def test_a_page_says_whether_there_is_a_fix(rule: str):
    kinds = offered().get(rule, set())
    assert RULES[rule].fix == ("safe" if "safe" in kinds else "unsafe" if kinds else "none")
    told = "## Fix" in catalogue.body(RULES[rule]) or "--fix" in catalogue.body(RULES[rule])
    assert told == bool(kinds)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ARANGE.replace(b"\n", b"\r\n"), ARANGE.replace(b"bfloat16", b"float32").replace(b"\n", b"\r\n")),
        (ARANGE.replace(b"    ", b"\t"), ARANGE.replace(b"bfloat16", b"float32").replace(b"    ", b"\t")),
        (b"\xef\xbb\xbf" + ARANGE, b"\xef\xbb\xbf" + ARANGE.replace(b"bfloat16", b"float32")),
        (ARANGE.rstrip(b"\n"), ARANGE.replace(b"bfloat16", b"float32").rstrip(b"\n")),
        (
            b"# coding: latin-1\nE = '\xe9'\n" + ARANGE,
            b"# coding: latin-1\nE = '\xe9'\n" + ARANGE.replace(b"bfloat16", b"float32"),
        ),
        (b"s = '\xc3\xa9'; " + ARANGE, b"s = '\xc3\xa9'; " + ARANGE.replace(b"bfloat16", b"float32")),
        (
            ARANGE.replace(b"\n\n\n", b"\n\x0c\n"),
            ARANGE.replace(b"\n\n\n", b"\n\x0c\n").replace(b"bfloat16", b"float32"),
        ),
        (
            ARANGE.replace(b"n, dtype=", b"(  # so\n        n),  # many\n        dtype = "),
            ARANGE.replace(b"n, dtype=", b"(  # so\n        n),  # many\n        dtype = ").replace(
                b"bfloat16", b"float32"
            ),
        ),
    ],
    ids=["crlf", "tabs", "bom", "no newline at end", "latin-1", "after a wide character", "form feed", "comments"],
)
def test_all_else_of_a_file_stays_byte_for_byte(before: bytes, after: bytes):
    assert fixed(program("steps", before), before, unsafe=True) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            b"from torch import arange, bfloat16\n\n\ndef steps(n):\n    return arange(n, dtype=bfloat16)\n",
            b"from torch import arange, bfloat16\nimport torch\n\n\ndef steps(n):\n    return arange(n, dtype=torch.float32)\n",
        ),
        (
            b'"""Steps."""\nimport torch as th\n\n\ndef steps(n):\n    return th.arange(n, dtype=th.bfloat16)\n',
            b'"""Steps."""\nimport torch as th\n\n\ndef steps(n):\n    return th.arange(n, dtype=th.float32)\n',
        ),
        (
            b"from torch import arange, bfloat16, float32\n\n\ndef steps(n):\n    return arange(n, dtype=bfloat16)\n",
            b"from torch import arange, bfloat16, float32\n\n\ndef steps(n):\n    return arange(n, dtype=float32)\n",
        ),
        (
            b"from torch import arange, bfloat16\n\n\ndef steps(n, torch):\n    return arange(n, dtype=bfloat16)\n",
            b"from torch import arange, bfloat16\n\n\ndef steps(n, torch):\n    return arange(n, dtype=bfloat16)\n",
        ),
    ],
    ids=["import added", "by its alias", "by its own name", "name taken"],
)
def test_names_are_spelled_as_the_file_spells_them(before: bytes, after: bytes):
    assert fixed(program("steps", before), before, unsafe=True) == after


@pytest.mark.parametrize(
    ("call", "new"),
    [
        ("autocast(args.amp)", 'autocast("cuda", enabled=args.amp)'),
        ("autocast(True, torch.bfloat16)", 'autocast("cuda", enabled=True, dtype=torch.bfloat16)'),
        ("autocast(dtype=torch.float16, )", 'autocast("cuda", dtype=torch.float16, )'),
        ("autocast(**options)", "autocast(**options)"),
    ],
)
def test_arguments_move_with_the_new_name(call: str, new: str):
    code = "import torch\nfrom torch.cuda.amp import autocast\n\n\ndef run(model, x, args, options):\n    with {}:\n        return model(x)\n"
    data = code.format(call).encode()
    assert new in fixed(program("run", data), data, unsafe=False).decode()


def test_the_command_fixes_files_and_reports_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    safe, unsafe = tmp_path / "run.py", tmp_path / "steps.py"
    safe.write_bytes(AUTOCAST)
    unsafe.write_bytes(ARANGE)
    arguments = ["check", str(tmp_path), "--isolated", "--no-cache", "--extend-select", "deprecated-amp-api"]

    assert main([*arguments, "--diff"]) == 1
    told = capsys.readouterr()
    assert '+    with torch.amp.autocast("cuda"):' in told.out.splitlines()
    assert "would fix 1 finding" in told.err
    assert (safe.read_bytes(), unsafe.read_bytes()) == (AUTOCAST, ARANGE)

    assert main(arguments) == 1
    assert (
        "1 with a safe fix [*] (--fix), 1 with an unsafe one (--fix --unsafe-fixes); --diff shows"
        in capsys.readouterr().out
    )

    assert main([*arguments, "--fix"]) == 1
    told = capsys.readouterr()
    assert "half-arange" in told.out and "deprecated-amp-api" not in told.out
    assert "fixed 1 finding" in told.err
    assert safe.read_bytes() == AUTOCAST.replace(b"torch.cuda.amp.autocast()", b'torch.amp.autocast("cuda")')
    assert unsafe.read_bytes() == ARANGE

    assert main([*arguments, "--fix", "--unsafe-fixes"]) == 0
    assert unsafe.read_bytes() == ARANGE.replace(b"bfloat16", b"float32")
    assert main([*arguments, "--diff", "--unsafe-fixes"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.py", "steps.py"]


def test_what_was_changed_is_read_again_whatever_the_cache_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "steps.py").write_bytes(ARANGE)
    os.utime(tmp_path / "steps.py", (1e9, 1e9))
    arguments = ["check", str(tmp_path / "steps.py"), "--isolated", "--cache-dir", str(tmp_path / "cache")]
    assert main(arguments) == 1
    assert main([*arguments, "--fix", "--unsafe-fixes"]) == 0
    assert main(arguments) == 0


def test_programs_get_the_fixes_as_edits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "steps.py").write_bytes(ARANGE)
    arguments = ["check", str(tmp_path / "steps.py"), "--isolated", "--no-cache"]
    main([*arguments, "--format", "json"])
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    edit = {"line": 5, "column": 40, "end_line": 5, "end_column": 48, "cell": 0, "text": "float32"}
    assert finding["fix"]["edits"][0] == edit
    assert finding["fix"]["safe"] is False
    main([*arguments, "--format", "sarif"])
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    (change,) = result["fixes"][0]["artifactChanges"]
    assert change["replacements"][0]["deletedRegion"]["startColumn"] == 40


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--unsafe-fixes"], "--unsafe-fixes belongs to --fix or --diff"),
        (["--fix", "--watch"], "--fix and --watch contradict each other"),
        (["--fix", "--write-baseline", "b"], "--fix and --write-baseline contradict each other"),
        (["--diff", "--add-ignores"], "--diff and --add-ignores contradict each other"),
    ],
)
def test_options_that_contradict_each_other(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", "x.py", *options]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions bind nobody here")
def test_a_folder_that_cannot_be_written_leaves_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "steps.py").write_bytes(ARANGE)
    tmp_path.chmod(0o500)
    try:
        assert main(["check", str(tmp_path), "--isolated", "--no-cache", "--fix", "--unsafe-fixes"]) == 2
    finally:
        tmp_path.chmod(0o700)
    assert (tmp_path / "steps.py").read_bytes() == ARANGE
    assert "steps.py: cannot be written: permission denied" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions bind nobody here")
def test_a_file_that_is_not_to_be_written_is_left_though_its_folder_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "steps.py").write_bytes(ARANGE)
    (tmp_path / "steps.py").chmod(0o444)
    assert main(["check", str(tmp_path), "--isolated", "--no-cache", "--fix", "--unsafe-fixes"]) == 2
    assert (tmp_path / "steps.py").read_bytes() == ARANGE
    assert "steps.py: cannot be written: permission denied" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="a full disk is made with a limit on the size of files")
def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path):
    data = ARANGE + b"# " + b"x" * 100_000 + b"\n"
    (tmp_path / "steps.py").write_bytes(data)
    command = f"ulimit -f 8; trap '' XFSZ; exec {sys.executable} -B -m precisionlint check {tmp_path} --isolated --no-cache --fix --unsafe-fixes"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2
    assert "steps.py: cannot be written: file too large" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["steps.py"]
    assert (tmp_path / "steps.py").read_bytes() == data


def test_the_broken_projects_hold_after_their_fixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "broken"
    shutil.copytree(ROOT / "fixtures/broken", home, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = ["check", str(home), "--isolated", "--no-cache", "--select", "all", "--format", "json"]
    main(arguments)
    before = json.loads(capsys.readouterr().out)["findings"]
    main([*arguments, "--fix", "--unsafe-fixes"])
    after = json.loads(capsys.readouterr().out)["findings"]
    left = [each for each in before if each["fix"] is None]
    gone = Counter(told_twice([each["rule"] for each in left]))
    gone.subtract(told_twice([each["rule"] for each in after]))
    assert all(0 <= gone[rule] <= sum(each["confidence"] == "possible" for each in left) for rule in gone)
    assert sum(gone.values()) < 5  # what is only possible may have come of what is fixed
    for path in home.rglob("*.py"):
        ast.parse(path.read_bytes())


@pytest.mark.parametrize(
    ("declared", "oldest"),
    [
        ('[project]\ndependencies = ["torch>=2.1,<3", "torchvision>=0.1"]\n', "2.1"),
        ('[project]\ndependencies = ["torch >= 2.4"]\n', "2.4"),
        ('[tool.poetry.dependencies]\ntorch = "*"\n', ""),
    ],
)
def test_a_fix_that_an_old_torch_does_not_know_is_unsafe(declared: str, oldest: str, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(declared)
    assert versions(tmp_path).oldest == (version(oldest) if oldest else None)
    data = b"import torch\n\nscaler = torch.cuda.amp.GradScaler()\n"
    (tmp_path / "run.py").write_bytes(data)
    (finding,) = check(str(tmp_path / "run.py"), data).findings
    assert finding.fix is not None
    assert finding.fix.unsafe == ("it needs torch 2.3, and the project allows 2.1" if oldest == "2.1" else "")


def clip(*lines: str) -> bytes:
    body = "".join(f"        {line}\n" for line in lines)
    return (
        "import torch\nfrom torch import nn\n\n\ndef train(model, loader, args):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    scaler = torch.amp.GradScaler('cuda')\n"
        "    for index, (x, y) in enumerate(loader):\n        optimizer.zero_grad()\n"
        "        with torch.autocast('cuda', dtype=torch.float16):\n            loss = model(x, y)\n"
        f"        scaler.scale(loss).backward()\n{body}"
    ).encode()


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("lines", "inserted"),
    [
        ((CLIP, "scaler.step(optimizer)", "scaler.update()"), True),
        (("if args.clip:", f"    {CLIP}", "scaler.step(optimizer)", "scaler.update()"), True),
        ((CLIP, "if index % 4 == 3:", "    scaler.step(optimizer)", "    scaler.update()"), False),
        ((f"pass; {CLIP}", "scaler.step(optimizer)", "scaler.update()"), True),
        ((f"if args.clip: {CLIP}", "scaler.step(optimizer)", "scaler.update()"), True),
        ((f"if args.clip: {CLIP}; continue", "scaler.step(optimizer)", "scaler.update()"), False),
        ((f"if {CLIP} > 9:", "    print(index)", "scaler.step(optimizer)", "scaler.update()"), False),
        ((CLIP, "scaler.unscale_(optimizer)", "scaler.step(optimizer)", "scaler.update()"), False),
        ((CLIP, "if index > 3:", "    continue", "scaler.step(optimizer)", "scaler.update()"), False),
    ],
    ids=[
        "in one block",
        "clipped at times",
        "stepped at times",
        "one of two on a line",
        "on the line of its if",
        "left on that line",
        "in a condition",
        "unscaled later",
        "left between",
    ],
)
def test_gradients_are_unscaled_before_a_clip_only_where_the_step_follows(lines: tuple[str, ...], inserted: bool):
    data = clip(*lines)
    after = fixed(program("clip", data), data, unsafe=True)
    assert (after != data) == inserted
    if inserted:
        assert after.replace(b"scaler.unscale_(optimizer)\n", b"").split() == data.split()


def test_two_clips_of_one_optimizer_are_unscaled_once():
    data = clip(CLIP, CLIP, "scaler.step(optimizer)", "scaler.update()")
    assert fixed(program("twice", data), data, unsafe=True).count(b"unscale_") == 1


USES = "\n\ndef run(model, x):\n    scaler = GradScaler()\n    with autocast(dtype=torch.float16):\n        return scaler.scale(model(x))\n"
NEW = USES.replace("GradScaler()", 'GradScaler("cuda")').replace("autocast(", 'autocast("cuda", ')


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import torch\nfrom torch.cuda.amp import GradScaler, autocast\n",
            "import torch\nfrom torch.amp import GradScaler, autocast\n",
        ),
        (
            "import torch\nfrom torch.cuda.amp import (\n    GradScaler,\n    autocast,\n)\n",
            "import torch\nfrom torch.amp import GradScaler, autocast\n",
        ),
        (
            "import torch\nfrom torch.cuda.amp import autocast\nfrom torch.cuda.amp.grad_scaler import GradScaler\n",
            "import torch\nfrom torch.amp import autocast\nfrom torch.amp import GradScaler\n",
        ),
    ],
)
def test_names_are_imported_from_their_new_module(before: str, after: str):
    data = f"{before}{USES}".encode()
    assert fixed(program("names", data), data, unsafe=False).decode() == after + NEW


def test_an_import_stays_where_its_name_is_read_in_another_way():
    data = f"import torch\nfrom torch.cuda.amp import GradScaler, autocast\n{USES}\n__all__ = ['autocast']\n".encode()
    after = fixed(program("all", data), data, unsafe=False).decode()
    assert "from torch.cuda.amp import autocast\nfrom torch.amp import GradScaler\n" in after
    assert 'with torch.amp.autocast("cuda", dtype=torch.float16):' in after


def test_calls_of_several_lines_keep_their_layout_at_any_depth():
    before = """import torch


class Trainer:
    def step(self, batches):
        for x in batches:
            with torch.cuda.amp.autocast(
                enabled=self.amp,  # as asked for
                dtype=self.dtype,
            ):
                self.model(x)
            grads = [
                torch.arange(
                    x.shape[0], dtype=torch.bfloat16
                ),
                (
                    x
                    * self.scale
                ).to(torch.float8_e4m3fn),
            ]
"""
    after = (
        before.replace("torch.cuda.amp.autocast(\n", 'torch.amp.autocast(\n                "cuda",\n')
        .replace("dtype=torch.bfloat16", "dtype=torch.float32")
        .replace(
            ").to(torch.float8",
            ").clamp(torch.finfo(torch.float8_e4m3fn).min, torch.finfo(torch.float8_e4m3fn).max).to(torch.float8",
        )
    )
    assert fixed(program("layout", before.encode()), before.encode(), unsafe=True).decode() == after


def test_fixed_functions_run_and_compute_what_their_pages_say():
    torch = pytest.importorskip("torch")
    before = b"""import torch


def masked(q, k, mask):
    scores = q.half() @ k.half()
    return scores.masked_fill(mask, -1e9)


def steps(n):
    return torch.arange(n, dtype=torch.bfloat16)


def coded(x, scale):
    return (x * scale).to(torch.float8_e5m2)
"""
    after = fixed(program("computed", before), before, unsafe=True)
    old, new = dict[str, Any](), dict[str, Any]()
    exec(before, old)
    exec(after, new)
    q, mask = torch.eye(2), torch.tensor([[False, True], [False, False]])
    with pytest.raises(RuntimeError, match="without overflow"):
        old["masked"](q, q, mask)
    assert new["masked"](q, q, mask).tolist() == [[1.0, -65504.0], [0.0, 1.0]]
    assert (len(old["steps"](2048).unique()), len(new["steps"](2048).unique())) == (641, 2048)
    x = torch.tensor([1.0, 1e6])
    assert old["coded"](x, 1.0).float().tolist() == [1.0, float("inf")]
    assert new["coded"](x, 1.0).float().tolist() == [1.0, 57344.0]


BACKWARD = "scaler.scale(loss).backward()"
TWO_LINES = f"{BACKWARD}\n        {CLIP_CALL}"


@pytest.mark.parametrize(
    ("written", "mended"),
    [
        (f"{BACKWARD}; {CLIP_CALL}", None),  # before the line would be before the backward
        (f"print({BACKWARD}, {CLIP_CALL})", None),
        (f"{BACKWARD}; seen = True; norm = \\\n            {CLIP_CALL}", None),
        (f"{BACKWARD}\n        print(float({CLIP_CALL}))", f"{BACKWARD}\n        scaler.unscale_(optimizer)\n        print(float({CLIP_CALL}))"),
        (f"{BACKWARD}\n        {CLIP_CALL}; seen = True", f"{BACKWARD}\n        scaler.unscale_(optimizer)\n        {CLIP_CALL}; seen = True"),
    ],
    ids=["one line", "one expression", "continued", "around it", "after it"],
)  # fmt: skip
def test_a_statement_is_put_before_nothing_that_has_to_come_first(tmp_path: Path, written: str, mended: str | None):
    file = tmp_path / "train.py"
    file.write_text(CLIPPED.replace(TWO_LINES, written))
    main(["check", str(file), "--isolated", "--no-cache", "--fix", "--select", "clip-before-unscale"])
    assert file.read_text() == CLIPPED.replace(TWO_LINES, mended or written)
