"""The catalogue's reader: the real catalogue and small ones, selection by name, and clear words for bad pages."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from precisionlint import catalogue
from precisionlint.catalogue import CatalogueError, Rule, UnknownNameError

ROOT = Path(__file__).parent.parent
FRONT = 'summary = "s"\nseverity = "error"\nfound-by = ["check"]\nfix = "none"\n'


def write(root: Path, page: str, front: str = FRONT, body: str = "# x\n") -> Path:
    path = root / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"+++\n{front}+++\n\n{body}", encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Mapping[str, Rule]:
    write(tmp_path, "loss/clip.md", FRONT + 'aliases = ["old-clip"]\n')
    write(tmp_path, "loss/scale.md", FRONT.replace("error", "info"))
    write(tmp_path, "matmul/tf32.md", FRONT.replace("error", "info") + "default = true\n")
    write(tmp_path, "matmul/half.md", FRONT.replace("error", "warning"))
    return catalogue.load(tmp_path)


def test_every_page_of_the_catalogue_loads():
    pages = sorted(page.stem for page in (ROOT / "rules").glob("*/*.md"))
    assert sorted(catalogue.load()) == pages
    assert [rule.name for members in catalogue.families().values() for rule in members] == list(catalogue.load())


def test_the_index_says_what_the_pages_say():
    assert (ROOT / "rules/README.md").read_text(encoding="utf-8") == catalogue.index()


def test_the_index_is_written_by_its_command(tmp_path: Path, small: Mapping[str, Rule]):
    assert "| [clip](loss/clip.md) | s | error | check | none |" in catalogue.index(small)
    assert "| [scale](loss/scale.md) | s | info, off by default | check | none |" in catalogue.index(small)
    wrong = subprocess.run([sys.executable, "-m", "precisionlint.catalogue"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--write-index" in wrong.stderr


def test_front_matter_becomes_a_rule(tmp_path: Path):
    front = 'summary = "a | b"\nseverity = "warning"\nfound-by = ["check", "audit"]\nfix = "safe"\ndefault = false\n'
    page = write(tmp_path, "fam/some-rule.md", front + 'aliases = ["former"]\n')
    assert catalogue.load(tmp_path)["some-rule"] == Rule(
        name="some-rule",
        family="fam",
        summary="a | b",
        severity="warning",
        found_by=("check", "audit"),
        fix="safe",
        on_by_default=False,
        aliases=("former",),
        page=page,
    )
    assert "| a \\| b |" in catalogue.index(catalogue.load(tmp_path))


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("+++\n\n", "", "does not begin with front matter"),
        ("+++\nsummary", "summary", "does not begin with front matter"),
        ('"s"', "", "front matter: Invalid value (at line 1, column 11)"),
        ("fix", "level = 1\nfix", "front matter: unknown key 'level'"),
        ('"error"', '"fatal"', "severity must be one of error, warning, info, not 'fatal'"),
        ("fix", "# fix", "fix must be one of none, safe, unsafe, not None"),
        ("fix", "default = 1\nfix", "default must be true or false, not 1"),
        ("fix", "aliases = [1]\nfix", "aliases must be a list of words, not [1]"),
        ('["check"]', '["guess"]', "found-by may hold check, audit, verify, not 'guess'"),
        ('["check"]', '"check"', "found-by must be a list of words, not 'check'"),
        ('["check"]', "[]", "found-by must be a list of words, not []"),
        ('"s"', '" "', "summary must be one line of text"),
        ('"s"', '"a\\nb"', "summary must be one line of text"),
        ('"s"', "1", "summary must be one line of text"),
    ],
)
def test_a_malformed_page_gives_one_line_with_its_path(tmp_path: Path, right: str, wrong: str, complaint: str):
    page = write(tmp_path, "fam/rule.md")
    assert right in page.read_text(encoding="utf-8")
    page.write_text(page.read_text(encoding="utf-8").replace(right, wrong, 1), encoding="utf-8")
    with pytest.raises(CatalogueError) as error:
        catalogue.load(tmp_path)
    assert str(error.value).startswith(f"{page}: ")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_page_that_is_not_text_gives_one_line(tmp_path: Path):
    write(tmp_path, "fam/rule.md").write_bytes(b"+++\n\xff\n+++\n")
    with pytest.raises(CatalogueError, match=r"fam/rule\.md: .*utf-8"):
        catalogue.load(tmp_path)


@pytest.mark.parametrize("name", ["Clip", "clip_grad", "-clip", "clip-"])
def test_names_are_lower_case_with_hyphens(tmp_path: Path, name: str):
    write(tmp_path, f"fam/{name}.md")
    with pytest.raises(CatalogueError, match="lower case with hyphens"):
        catalogue.load(tmp_path)


@pytest.mark.parametrize("alias", ["other", "fam", "all", "rule"])
def test_no_name_stands_for_two_things(tmp_path: Path, alias: str):
    write(tmp_path, "fam/other.md")
    write(tmp_path, "fam/rule.md", FRONT + f'aliases = ["{alias}"]\n')
    with pytest.raises(CatalogueError, match=f"the name '{alias}' is taken"):
        catalogue.load(tmp_path)


def test_an_empty_catalogue_is_said(tmp_path: Path):
    with pytest.raises(CatalogueError, match="holds no page"):
        catalogue.load(tmp_path)


@pytest.mark.parametrize(
    ("select", "extend", "ignore", "expected"),
    [
        ([], [], [], {"clip", "tf32", "half"}),
        (["all"], [], [], {"clip", "scale", "tf32", "half"}),
        (["loss"], [], [], {"clip", "scale"}),
        (["clip"], [], [], {"clip"}),
        (["old-clip"], [], [], {"clip"}),
        ([], ["scale"], [], {"clip", "scale", "tf32", "half"}),
        (["clip"], ["matmul"], [], {"clip", "tf32", "half"}),
        ([], [], ["tf32"], {"clip", "half"}),
        ([], [], ["old-clip"], {"tf32", "half"}),
        (["all"], [], ["loss"], {"tf32", "half"}),
        (["clip"], [], ["loss"], {"clip"}),
        ([], ["clip"], ["all"], {"clip"}),
        (["clip"], [], ["clip"], set()),
        ([], [], ["all"], set()),
    ],
)
def test_the_narrower_word_decides_and_ignore_between_equals(small, select, extend, ignore, expected):
    assert catalogue.select(select, extend, ignore, small) == expected


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("clp", "did you mean 'clip'?"),
        ("old-clap", "did you mean 'old-clip'?"),
        ("matmull", "did you mean 'matmul'?"),
        ("al", "did you mean 'all'?"),
        ("xyzzy", "`precisionlint rules` lists them"),
    ],
)
def test_an_unknown_word_names_the_nearest_right_one(small, word: str, hint: str):
    for position in range(3):
        words = [[word] if position == each else [] for each in range(3)]
        with pytest.raises(UnknownNameError) as error:
            catalogue.select(*words, rules=small)
        assert str(error.value) == f"no rule or family is called '{word}'; {hint}"


def test_a_rule_is_found_by_name_and_by_alias(small):
    assert catalogue.find("clip", small) is catalogue.find("old-clip", small)
    with pytest.raises(UnknownNameError, match="no rule is called 'clap'; did you mean 'clip'"):
        catalogue.find("clap", small)


BODY = """\
# rule

```python wrong
a = 1  # <- rule
b = 2  # <- rule, other
```

````python right
'''
```
'''
````

```sh
ignored
```

```python experiment
print(1)
```

```text
1
```
"""


def test_examples_keep_their_code_their_marks_and_their_lines(tmp_path: Path):
    page = write(tmp_path, "fam/rule.md", body=BODY)
    wrong, right = catalogue.examples(catalogue.load(tmp_path)["rule"])
    assert (wrong.kind, wrong.marks) == ("wrong", ((1, "rule"), (2, "rule"), (2, "other")))
    assert (right.kind, right.code, right.marks) == ("right", "'''\n```\n'''\n", ())
    lines = page.read_text().split("\n")
    for example in (wrong, right):
        assert lines[example.line - 1] == example.code.split("\n")[0]


def test_an_experiment_comes_with_its_output(tmp_path: Path):
    write(tmp_path, "fam/rule.md", body=BODY)
    write(tmp_path, "fam/none.md")
    found = catalogue.experiment(catalogue.load(tmp_path)["rule"])
    assert found is not None
    assert (found.code, found.output) == ("print(1)\n", "1\n")
    assert catalogue.experiment(catalogue.load(tmp_path)["none"]) is None


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("```python experiment\n1\n```\n", "output, a ```text block, does not follow"),
        ("```python experiment\n1\n```\n\n```python right\n```\n\n```text\n```\n", "does not follow"),
        ("```python experiment\n```\n```text\n```\n" * 2, "2 experiments"),
        ("```python experiment\n1\n", r"rule\.md:8: the block that opens here is not closed"),
    ],
)
def test_a_malformed_body_gives_one_line(tmp_path: Path, body: str, complaint: str):
    write(tmp_path, "fam/rule.md", body=body)
    with pytest.raises(CatalogueError, match=complaint):
        catalogue.experiment(catalogue.load(tmp_path)["rule"])
