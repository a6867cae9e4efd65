"""What a report promises to fix is what `--fix` does: no more is promised, wherever a fault stands."""

import shutil
from pathlib import Path

import pytest
from programs import CLIP as CLIPPED
from programs import CLIP_CALL

from precisionlint import catalogue, checking
from precisionlint.cli import main
from precisionlint.config import Configuration
from precisionlint.findings import Report
from precisionlint.source.fix_trees import LONGEST

ROOT = Path(__file__).parent.parent
AT = f"        {CLIP_CALL}\n"
UNSCALE = "scaler.unscale_(optimizer)"


def report(path: Path) -> Report:
    return checking.check(checking.Request((str(path),), Configuration({"select": ("all",)}, isolated=True)))


def promised(path: Path) -> list[str]:
    """The rules that a report says it has a safe fix for."""
    return sorted(each.rule for each in report(path).findings if each.fix is not None and each.fix.safe)


def fixed(path: Path) -> None:
    main(["check", str(path), "--isolated", "--no-cache", "--select", "all", "--fix"])


SHAPES = {
    "if": f"        if index:\n            {CLIP_CALL}\n",
    "if on one line": f"        if index: {CLIP_CALL}\n",
    "if on one line, with more": f"        if index: {CLIP_CALL}; seen = True\n",
    "if on one line, after a call": f"        if index: print(1); {CLIP_CALL}\n",
    "if on one line that leaves": f"        if index: {CLIP_CALL}; continue\n",
    "else on one line": f"        if index: pass\n        else: {CLIP_CALL}\n",
    "elif on one line": f"        if index: pass\n        elif x is None: {CLIP_CALL}  # so\n        else: pass\n",
    "an if of several lines": f"        if (index\n                and x is not None): {CLIP_CALL}\n",
    "with on one line": f"        with torch.no_grad(): {CLIP_CALL}\n",
    "for on one line": f"        for _ in range(1): {CLIP_CALL}\n",
    "try on one line": f"        try: {CLIP_CALL}\n        finally: pass\n",
    "case on one line": f"        match index:\n            case 0: {CLIP_CALL}\n            case _: pass\n",
    "condition": f"        if {CLIP_CALL} > 9:\n            print(index)\n",
    "condition of an elif": f"        if index == 3:\n            pass\n        elif {CLIP_CALL} > 9:\n            print(index)\n",
    "condition of a loop": f"        while {CLIP_CALL} > 9:\n            print(index)\n",
    "inner loop": f"        for micro in x:\n            {CLIP_CALL}\n",
    "both branches": f"        if index:\n    {AT}        else:\n            print(index)\n    {AT}",
    "both branches on one line": f"        if index: {CLIP_CALL}\n        else: {CLIP_CALL}\n",
    "three branches": f"        if index: {CLIP_CALL}\n        elif x is None: {CLIP_CALL}\n        else:\n    {AT}",
    "several lines among others": "        seen = 1; " + CLIP_CALL.replace("(", "(\n            ", 1) + "; seen = 2\n",
    "behind a backslash": f"        seen = 1; \\\n        {CLIP_CALL}\n",
    "twice": f"{AT}{AT}",
    "twice, the second at times": f"{AT}        if index:\n    {AT}",
    "twice, the first at times": f"        if index:\n    {AT}{AT}",
    "each at times": f"        if index:\n    {AT}        if x is not None:\n    {AT}",
}
"""Where a clip can stand, by what is made of it."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_clip_that_is_promised_a_fix_gets_one(shape: str, tmp_path: Path):
    assert CLIPPED.count(AT) == 1
    file = tmp_path / "train.py"
    file.write_text(CLIPPED.replace(AT, SHAPES[shape]))
    before = report(file)
    assert "clip-before-unscale" in {each.rule for each in before.findings}
    fixed(file)
    assert promised(file) == []
    kept = [each.rule for each in before.findings if each.fix is None or not each.fix.safe]
    assert sorted(each.rule for each in report(file).findings) == sorted(kept), file.read_text()


BLOCK = f":\n            {UNSCALE}\n            {CLIP_CALL}"
MENDED = {
    "if on one line": f"        if index{BLOCK}\n",
    "if on one line, with more": f"        if index{BLOCK}; seen = True\n",
    "elif on one line": f"        if index: pass\n        elif x is None{BLOCK}  # so\n        else: pass\n",
    "an if of several lines": f"        if (index\n                and x is not None){BLOCK}\n",
    "with on one line": f"        with torch.no_grad(){BLOCK}\n",
    "both branches on one line": f"        if index{BLOCK}\n        else{BLOCK}\n",
    "if on one line that leaves": SHAPES["if on one line that leaves"],
    "inner loop": SHAPES["inner loop"],
    "each at times": SHAPES["each at times"].replace(CLIP_CALL, f"{UNSCALE}\n            {CLIP_CALL}", 1),
}


@pytest.mark.parametrize("shape", MENDED)
def test_what_stands_on_the_line_of_its_if_becomes_a_block(shape: str, tmp_path: Path):
    file = tmp_path / "train.py"
    file.write_text(CLIPPED.replace(AT, SHAPES[shape]))
    fixed(file)
    assert file.read_text() == CLIPPED.replace(AT, MENDED[shape])


def test_the_text_promises_no_more_than_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "train.py"
    arguments = ["check", str(file), "--isolated", "--no-cache", "--select", "clip-before-unscale"]
    file.write_text(CLIPPED.replace(AT, SHAPES["inner loop"]))
    assert main(arguments) == 1
    assert "[*]" not in (told := capsys.readouterr().out) and "--fix" not in told
    file.write_text(CLIPPED.replace(AT, SHAPES["if on one line"]))
    assert main(arguments) == 1
    assert "1 with a safe fix [*] (--fix)" in capsys.readouterr().out
    assert main([*arguments, "--fix"]) == 0
    assert "fixed 1 finding" in capsys.readouterr().err


def test_all_that_the_broken_programs_are_promised_is_fixed(tmp_path: Path):
    home = tmp_path / "broken"
    shutil.copytree(ROOT / "fixtures/broken", home, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path: path.read_bytes() for path in home.rglob("*.py")}
    fixed(home)
    assert any(path.read_bytes() != data for path, data in before.items())
    assert promised(home) == []


def test_a_helper_that_the_forward_may_share_is_changed_only_with_leave(tmp_path: Path):
    pages = catalogue.examples(catalogue.find("fp8-fast-accumulation-in-backward"))
    (code,) = (each.code for each in pages if each.kind == "wrong" and "def product(" in each.code)
    file = tmp_path / "layers.py"
    file.write_text(code)
    (finding,) = report(file).findings
    assert finding.fix is not None
    assert finding.fix.unsafe == "product is called by the backward, and whatever else calls it changes too"
    fixed(file)
    assert file.read_text() == code
    file.write_text(code.replace("product(", "product_backward("))
    assert promised(file) == ["fp8-fast-accumulation-in-backward"]


AROUND = '''"""A module."""
# of some lines
import functools

import torch

TABLE = [
    1,
]


def other(x):  # left alone
    return x.float()

'''
WITHIN = '''
# above it
@functools.cache
class Steps:
    # inside

    @staticmethod
    def of(
        n,
    ):
        """Steps."""
        return torch.arange(  # first
            n,

            dtype=torch.bfloat16,
        )
    # at its end

# below it
'''


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_stands_around_a_fixed_function_stays(newline: str, tmp_path: Path):
    text = f"{AROUND}{WITHIN}{AROUND.replace('other', 'another')}if TABLE:\n    print(other)\n".replace("\n", newline)
    file = tmp_path / "steps.py"
    file.write_bytes(text.encode())
    assert [each.rule for each in report(file).replacements] == ["half-arange"]
    main(["check", str(file), "--isolated", "--no-cache", "--select", "all", "--fix", "--unsafe-fixes"])
    assert file.read_bytes().decode() == text.replace("dtype=torch.bfloat16", "dtype=torch.float32")


def test_a_long_file_has_its_fixes_where_their_functions_are_short(tmp_path: Path):
    file = tmp_path / "steps.py"
    rest = "# a line\n" * (LONGEST // 8)
    assert len(rest) > LONGEST
    file.write_text(f"{AROUND}{rest}{WITHIN}{rest}")
    assert [each.rule for each in report(file).replacements] == ["half-arange"]
    alone = WITHIN.replace("        return torch", "        # a line\n" * (LONGEST // 16) + "        return torch")
    file.write_text(f"{AROUND}{alone}")
    assert [(each.rule, each.fix) for each in report(file).findings] == [("half-arange", None)]


def test_a_fault_of_the_top_level_of_a_script_is_fixed_where_its_step_follows(tmp_path: Path):
    lines = CLIPPED[CLIPPED.index("    model =") :].replace("\n    ", "\n")[4:]
    script = CLIPPED[: CLIPPED.index("\n\ndef train")] + "\nfrom data import loader\n" + lines
    file = tmp_path / "train.py"
    file.write_text(script)
    fixed(file)
    assert file.read_text() == script.replace(CLIP_CALL, f"{UNSCALE}\n    {CLIP_CALL}")


MOVED = """
import torch


def rotary(dim, n, base=10000.0):
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.bfloat16) / dim))
    t = {positions}
    freqs = torch.outer(t, inv_freq)
    return freqs.cos(), freqs.sin()
"""


@pytest.mark.parametrize(
    ("positions", "mended"),
    [
        ("torch.arange(n, dtype=torch.float32)", True),
        ("torch.arange(n, dtype=torch.bfloat16)", True),
        ("torch.arange(n).to(torch.bfloat16)", False),  # with frequencies in fp32 only its own cast would be to blame
        ("torch.arange(n).bfloat16()", False),
    ],
)
def test_an_unsafe_fix_that_only_moves_a_fault_is_not_made(positions: str, mended: bool, tmp_path: Path):
    file = tmp_path / "rope.py"
    file.write_text(MOVED.format(positions=positions))
    before = {(each.rule, each.place.line) for each in report(file).findings if each.confidence != "possible"}
    assert before
    main(["check", str(file), "--isolated", "--no-cache", "--select", "all", "--fix", "--unsafe-fixes"])
    after = {(each.rule, each.place.line) for each in report(file).findings if each.confidence != "possible"}
    assert after == (set() if mended else before)
