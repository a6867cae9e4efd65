"""Programs in other documents: notebooks, Markdown, standard input; their places, and what IPython adds to the language."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import CLIP, CLIP_CALL, CLIP_LINE, SOUND

import precisionlint
from precisionlint import cli, documents
from precisionlint.findings import Report

COMMAND = [sys.executable, "-m", "precisionlint", "check"]
HEAD, LOOP = CLIP.split("\n\n\ndef train(loader):\n")
LOOP = "\n".join(line[4:] for line in LOOP.split("\n"))
SETUP, STEPS = LOOP.split("for x, y in loader:\n")
STEPS = f"for x, y in loader:\n{STEPS}"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notebook(*cells: str | tuple[str, str], **more: Any) -> dict[str, Any]:
    """A notebook as Jupyter writes it; a cell is its code, or (type, text)."""
    made: list[dict[str, Any]] = []
    for cell in cells:
        kind, text = cell if isinstance(cell, tuple) else ("code", cell)
        made.append({"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)})
        if kind == "code":
            output = {"name": "stdout", "output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n", "é\n"]}
            made[-1] |= {"execution_count": 3, "outputs": [output]}
    metadata = {"language_info": {"name": "python"}, "kernelspec": {"name": "python3"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5} | more


def write(content: object, name: str = "train.ipynb") -> Path:
    path = Path(name)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def found(report: Report) -> list[tuple[int, int, int, str]]:
    return [(f.place.cell, f.place.line, f.place.column, f.rule) for f in report.findings]


# notebooks


def test_cells_are_one_program_and_places_are_cell_and_line():
    write(notebook(("markdown", "# Training"), HEAD, SETUP, ("raw", "x"), STEPS, "print('done')"))
    report = precisionlint.check("train.ipynb")
    line = STEPS.split("\n").index(f"    {CLIP_CALL}") + 1
    assert found(report) == [(5, line, 5, "clip-before-unscale")]
    assert [step.place.cell for step in report.findings[0].trace] == [5, 5, 5]
    assert report.findings[0].place.where == f"train.ipynb:cell 5:{line}"
    assert precisionlint.check(".").findings == report.findings


def test_a_finding_in_a_notebook_is_shown_with_its_line(capsys):
    write(notebook(HEAD, SETUP, STEPS))
    assert cli.main(["check", "train.ipynb"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("train.ipynb:cell 3:6:5: error clip-before-unscale [*]: ")
    assert f"\n6 |     {CLIP_CALL}\n" in out
    assert "\n  1. train.ipynb:cell 3:5: the loss is scaled" in out


def test_a_sound_notebook_gives_nothing_and_a_source_may_be_one_string():
    write(notebook(SOUND))
    assert found(precisionlint.check(".")) == []
    one = notebook()
    one["cells"] = [{"cell_type": "code", "source": CLIP}, {"cell_type": "code"}]
    write(one)
    assert found(precisionlint.check(".")) == [(1, CLIP_LINE, 9, "clip-before-unscale")]


MAGICS = """\
%load_ext autoreload
%matplotlib inline
!pip install -q torch
!ls | \\
  grep x
files = !ls
kind = %env KIND
?model
model.fit??
%timeit -n 10 print(1)
%time print(2)
text = '''
%not magic
!not shell
'''
value = (7
    % 3
)
if kind:
    %pwd
    !nvidia-smi
    cd ..
pip install torch
ls -l
rm = cp
"""


def test_magics_and_shell_lines_are_tolerated_and_lines_stay_in_place():
    plain = list(documents.plain(MAGICS))
    assert len(plain) == len(MAGICS.split("\n"))
    tree = ast.parse("\n".join(plain))
    assert [node.lineno for node in tree.body] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 16, 19, 23, 24, 25]
    assert [ast.unparse(node) for node in tree.body[-3:]] == ["pass", "ls - l", "rm = cp"]
    assert ast.unparse(tree.body[4]) == "files = get_ipython().getoutput('ls')"
    assert ast.unparse(tree.body[8]) == "print(1)"
    assert ast.unparse(tree.body[9]) == "print(2)"
    assert "%not magic" in plain[12]
    write(
        notebook(MAGICS, f"%%time\n{CLIP}", "%%bash\nif [ x ]; then echo; fi", "%%html\n<b>", "%%capture out\nprint(1)")
    )
    report = precisionlint.check("train.ipynb")
    assert (found(report), report.errors) == ([(2, CLIP_LINE + 1, 9, "clip-before-unscale")], ())


@pytest.mark.parametrize(
    "line",
    ["a % b", "x = 5 % 3", "a != b", "x = y if a != b else c", "s = '!x'", "d = {'a': 1}  # what?", "x = '%d' % 3"],
)
def test_python_of_its_own_is_left_alone(line: str):
    assert list(documents.plain(line)) == [line]


def test_a_cell_that_is_no_python_is_told_by_cell_and_line():
    write(notebook("import torch", f"x = 1\n{CLIP}\ndef ("))
    report = precisionlint.check(".")
    assert [(error.path, error.line) for error in report.errors] == [("train.ipynb", None)]
    assert report.errors[0].message.startswith(f"cell 2, line {CLIP.count(chr(10)) + 3}: syntax error")


def test_the_other_cells_of_a_notebook_with_a_broken_one_are_checked_and_fixed(capsys):
    cells = (HEAD, "print 1", SETUP, f"def broken(:\n    {CLIP_CALL}", STEPS, "x = [\n")
    write(notebook(*cells))
    line = STEPS.split("\n").index(f"    {CLIP_CALL}") + 1
    report = precisionlint.check("train.ipynb")
    assert found(report) == [(5, line, 5, "clip-before-unscale")]
    (error,) = report.errors
    assert error.message.startswith("cell 2, line 1: syntax error: ") and error.message.endswith(" (and cells 4, 6)")
    assert cli.main(["check", "train.ipynb", "--no-cache", "--fix"]) == 2
    assert "fixed 1 finding" in capsys.readouterr().err
    mended = STEPS.replace(CLIP_CALL, f"scaler.unscale_(optimizer)\n    {CLIP_CALL}")
    write(notebook(*(mended if cell == STEPS else cell for cell in cells)), "mended.ipynb")
    assert Path("train.ipynb").read_bytes() == Path("mended.ipynb").read_bytes()


def test_a_broken_cell_alone_is_told_where_it_trains_or_the_notebook_is_named(capsys):
    write(notebook(f"{CLIP}\ndef ("))
    assert cli.main(["check", ".", "--no-cache"]) == 2
    assert f"train.ipynb: cell 1, line {CLIP.count(chr(10)) + 2}: syntax error" in capsys.readouterr().err
    write(notebook("print('plain')", "def ("))
    assert cli.main(["check", ".", "--no-cache"]) == 0
    assert cli.main(["check", "train.ipynb", "--no-cache"]) == 2
    assert "train.ipynb: cell 2, line 1: syntax error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"cells": 1}', "[" * 100_000, '{"worksheets": [{"cells": []}], "nbformat": 3}', "\ufeff{"],
)
def test_what_is_no_notebook_is_one_line(content: str):
    Path("train.ipynb").write_text(content, encoding="utf-8")
    (error,) = precisionlint.check(".").errors
    assert "is no notebook" in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    "cells",
    [
        [{}, 1],
        [{}, None],
        [{}, []],
        [{}, {"cell_type": "code", "source": 5}],
        [{}, {"cell_type": "code", "source": {"a": 1}}],
        [{}, {"cell_type": "code", "source": [1, None, "x = 1"]}],
    ],
)
def test_a_cell_of_an_odd_shape_is_told_and_costs_no_other(cells: list[Any], capsys):
    whole = notebook(HEAD, SETUP, STEPS)["cells"]
    write({"cells": [*cells, *whole], "metadata": 3})
    assert cli.main(["check", "--no-cache", "."]) == 2
    told = capsys.readouterr()
    assert told.err == "precisionlint: train.ipynb: cell 2: has no text (or list of texts) as its source\n"
    assert "clip-before-unscale" in told.out


def test_a_cell_whose_source_is_null_holds_nothing():
    whole = notebook(HEAD, SETUP, STEPS)["cells"]
    write({"cells": [{"cell_type": "code", "source": None}, *whole], "metadata": {}})
    report = precisionlint.check(".")
    assert (report.errors, [each.rule for each in report.findings]) == ((), ["clip-before-unscale"])


def test_notebooks_of_other_languages_are_left_alone():
    write(notebook(f"{CLIP}\nlibrary(x) <-", metadata={"language_info": {"name": "R"}}))
    report = precisionlint.check(".")
    assert (report.findings, report.errors) == ((), ())


def test_comments_in_cells_silence_and_are_judged():
    write(notebook(HEAD, SETUP, STEPS.replace(CLIP_CALL, f"{CLIP_CALL}  # precisionlint: ignore[clip-before-unscale]")))
    report = precisionlint.check(".")
    assert (report.findings, len(report.suppressed)) == ((), 1)
    write(notebook(SOUND, "x = 1  # precisionlint: ignore[clip-before-unscale]"))
    assert found(precisionlint.check(".")) == [(2, 1, 32, "unused-ignore")]
    write(notebook(f"# precisionlint: ignore-file[all] an example\n{CLIP}"))
    assert found(precisionlint.check(".")) == []


@pytest.mark.parametrize("indent", [1, 2, None])
def test_comments_are_written_into_cells_and_nothing_else_changes(indent: int | None, capsys):
    content = notebook(HEAD, SETUP, STEPS, ("markdown", "ü"))
    Path("train.ipynb").write_text(json.dumps(content, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert cli.main(["check", ".", "--add-ignores"]) == 0
    after = Path("train.ipynb").read_text(encoding="utf-8")
    content["cells"][2]["source"][5] = f"    {CLIP_CALL}  # precisionlint: ignore[clip-before-unscale]\n"
    assert after == json.dumps(content, indent=indent, ensure_ascii=False)
    assert cli.main(["check", "."]) == 0


FAULTY = (
    "%matplotlib inline\nimport torch\nfrom torch import nn",
    "%%time\nmodel = nn.Linear(2, 2)\nscaler = torch.cuda.amp.GradScaler()\nopt = torch.optim.SGD(model.parameters(), lr=0.1)",
    "steps = torch.arange(3000, dtype=torch.bfloat16)\nfor b in data:\n    opt.zero_grad()\n    loss = model(b)\n"
    "    scaler.scale(loss).backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    !nvidia-smi\n"
    "    scaler.step(opt)\n    scaler.update()\n",
)


def test_fixes_in_a_notebook_change_their_characters_and_leave_outputs_and_magics_alone(capsys):
    content = notebook(*FAULTY, ("markdown", "ü"))
    content["cells"][2]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": ["ü 0.1\n"]}]
    path = write(content)
    arguments = ["check", str(path), "--select", "all", "--no-cache", "--format", "concise"]
    assert cli.main([*arguments, "--diff"]) == 1
    assert '+    "    scaler.unscale_(opt)\\n",' in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8")) == content
    assert cli.main([*arguments, "--fix", "--unsafe-fixes"]) == 0
    assert capsys.readouterr().err == "precisionlint: fixed 3 findings\n"
    fixed = json.loads(path.read_text(encoding="utf-8"))
    changes = (
        ("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")'),
        ("dtype=torch.bfloat16", "dtype=torch.float32"),
        ("    nn.utils.clip", "    scaler.unscale_(opt)\n    nn.utils.clip"),
    )
    for cell, was in zip(fixed["cells"], content["cells"], strict=True):
        source = "".join(was.pop("source"))
        for old, new in changes:
            source = source.replace(old, new)
        assert "".join(cell.pop("source")) == source
    assert fixed == content


def test_a_fix_that_would_change_a_line_of_ipython_is_none():
    write(notebook("import torch", "%time scaler = torch.cuda.amp.GradScaler()"))
    report = precisionlint.check("train.ipynb", select=["deprecated-amp-api"])
    assert [each.place.where for each in report.findings] == ["train.ipynb:cell 2:1"]
    assert cli.main(["check", "train.ipynb", "--select", "all", "--no-cache", "--diff"]) == 0


def test_a_notebook_that_is_laid_out_otherwise_is_left_as_it_is(capsys):
    text = json.dumps(notebook(CLIP), indent=3)
    Path("train.ipynb").write_text(text)
    assert cli.main(["check", ".", "--add-ignores"]) == 2
    assert Path("train.ipynb").read_text() == text
    assert "not laid out as Jupyter does it" in capsys.readouterr().err


def test_a_percent_script_of_jupytext_is_a_program():
    Path("train.py").write_text(f"# %% [markdown]\n# Training\n\n# %%\n{HEAD}\n\n# %%\n{SETUP}\n# %%\n{STEPS}")
    assert [rule for *_, rule in found(precisionlint.check("."))] == ["clip-before-unscale"]


# Markdown


def test_each_block_of_markdown_is_a_program_at_its_lines():
    text = f"# Docs\n\n```python\n{CLIP}```\n\ntext\n\n```py\n{SOUND}```\n\n~~~python title='x'\n{CLIP}~~~\n\n```\n{CLIP}```\n```sh\nx\n```\n"
    Path("docs.md").write_text(text)
    assert precisionlint.check(".").coverage.files == 0
    report = precisionlint.check(".", markdown=True)
    lines = [number for number, line in enumerate(text.split("\n"), 1) if CLIP_CALL in line]
    assert [place.line for place in (f.place for f in report.findings)] == [lines[0], lines[2]]
    assert precisionlint.check("docs.md").findings == report.findings


def test_blocks_in_lists_and_quotes_keep_their_columns():
    body = "".join(f"  > {line}\n" for line in CLIP.splitlines())
    Path("docs.md").write_text(f"- item\n\n  > ```python\n{body}  > ```\n")
    report = precisionlint.check("docs.md")
    (finding,) = report.findings
    assert Path("docs.md").read_text().split("\n")[finding.place.line - 1][finding.place.column - 1 :] == CLIP_CALL


@pytest.mark.parametrize("block", [f"{CLIP}\n...\nthen (", f">>> {CLIP}", "import torch, torch.optim.Adam\nif"])
def test_a_block_that_is_no_python_is_no_error(block: str):
    Path("docs.md").write_text(f"```python\n{block}\n```\n```python\n{CLIP}```\n")
    report = precisionlint.check("docs.md")
    assert (len(report.findings), report.errors) == (1, ())


def test_a_comment_in_a_block_may_speak_of_what_the_block_does_not_show(capsys):
    comment = f"{CLIP_CALL}  # precisionlint: ignore[clip-before-unscale] as published\n"
    Path("docs.md").write_text(f"```python\n{comment}```\n")
    Path("train.py").write_text(comment)
    assert precisionlint.check("docs.md").findings == ()
    assert [f.rule for f in precisionlint.check("train.py").findings] == ["unused-ignore"]
    readme = Path(precisionlint.__file__).parent.parent / "README.md"
    assert cli.main(["check", str(readme)]) == 0


def test_an_open_block_ends_nowhere():
    Path("docs.md").write_text(f"```python\n{CLIP}")
    assert precisionlint.check("docs.md").findings == ()


def test_the_pages_of_the_catalogue_show_what_they_say():
    page = Path(precisionlint.__file__).parent.parent / "rules/loss-scaling/clip-before-unscale.md"
    report = precisionlint.check(str(page))
    lines = page.read_text().split("\n")
    marked = [number for number, line in enumerate(lines, 1) if "# <- clip-before-unscale" in line]
    experiment = lines.index("```python experiment")
    told = [f.place.line for f in report.findings if f.rule == "clip-before-unscale"]
    assert [line for line in told if line < experiment] == marked
    assert len(told) == len(marked) + 1


def test_comments_are_written_into_markdown(capsys):
    Path("docs.md").write_text(
        f"1. do\n\n   ```python\n{''.join(f'   {line}' + chr(10) for line in CLIP.splitlines())}   ```\n"
    )
    assert cli.main(["check", "docs.md", "--add-ignores"]) == 0
    assert f"           {CLIP_CALL}  # precisionlint: ignore[clip-before-unscale]\n" in Path("docs.md").read_text()


# standard input and texts


def stdin(text: str | bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    data = text.encode() if isinstance(text, str) else text
    return subprocess.run([*COMMAND, "-", *arguments], input=data, capture_output=True, timeout=60)


def test_standard_input_is_read_under_the_name_given():
    Path("helpers.py").write_text(
        "from torch import nn\n\n\ndef clip(model):\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    )
    text = CLIP.replace(CLIP_CALL, "clip(model)").replace(
        "import torch\n", "import torch\nfrom helpers import clip\n", 1
    )
    Path("train.py").write_text("this is not what is read (")
    ran = stdin(text, "--stdin-filename", "train.py")
    assert (ran.returncode, ran.stderr) == (1, b"")
    out = ran.stdout.decode()
    assert out.startswith(f"train.py:{CLIP_LINE + 1}:9: error clip-before-unscale")
    assert f"\n{CLIP_LINE + 1} |         clip(model)\n" in out
    assert "helpers.py:5: clipped here" in out


def test_standard_input_without_a_name():
    ran = stdin(CLIP)
    assert (ran.returncode, ran.stderr) == (1, b"")
    assert ran.stdout.decode().startswith(f"<stdin>:{CLIP_LINE}:9: error")
    assert stdin("x = (").stderr.decode().startswith("precisionlint: <stdin>:1: syntax error")
    assert stdin(f"{CLIP}\nx = (").stderr.decode().startswith("precisionlint: <stdin>:")
    assert stdin(b"").returncode == 0


def test_standard_input_keeps_to_the_settings_of_its_name():
    Path("precisionlint.toml").write_text(
        'extend-exclude = ["old/"]\nforce-exclude = true\n[per-file-ignores]\n"tests/*" = ["all"]\n'
    )
    assert stdin(CLIP, "--stdin-filename", "train.py").returncode == 1
    assert stdin(CLIP, "--stdin-filename", "tests/train.py").returncode == 0
    assert stdin(CLIP, "--stdin-filename", "old/train.py").returncode == 0
    content = json.dumps(notebook(CLIP))
    assert stdin(content, "--stdin-filename", "a.ipynb").stdout.startswith(b"a.ipynb:cell 1:")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-", "a.py"], "standard input (-) is read alone"),
        (["a.py", "--stdin-filename", "b.py"], "--stdin-filename belongs to standard input: PATH must be -"),
        (["-", "--add-ignores"], "--add-ignores writes files, and standard input is none"),
    ],
)
def test_wrong_uses_of_standard_input(arguments: list[str], complaint: str, capsys):
    assert cli.main(["check", *arguments]) == 2
    assert capsys.readouterr().err == f"precisionlint: {complaint}\n"


def test_texts_stand_for_files_in_the_api():
    report = precisionlint.check("train.py", texts={"train.py": CLIP})
    assert [f.rule for f in report.findings] == ["clip-before-unscale"]
    assert precisionlint.check("train.py", texts={"train.py": SOUND.encode()}).findings == ()
