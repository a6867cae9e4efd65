"""Long tables of numbers are left out of what is parsed: all else stays where it is, and nothing is found less."""

import ast
import random
from pathlib import Path

import pytest
from programs import CLIP, CLIP_LINE

import precisionlint
from precisionlint.source.literals import LONG, thinned
from precisionlint.source.parsing import parse

SHORT = 30_000


def long_text(rows: list[str], before: str = "X = [\n", after: str = "]\n", long: int = SHORT) -> bytes:
    """Rows over and over, until it is worth to leave them out."""
    body = "".join(f"    {row},\n" for row in rows)
    return (before + body * (1 + long // len(body)) + after).encode()


@pytest.mark.parametrize(
    "row",
    ["0.25", "1, 2, 3", "[1, -2.5e-3, .5]", "(1, (2, 3)), (4, (5, 6))", "[[1,], [2,],]", "1_000, 0, 1e5", "[(1 , 2) , [3] ]"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("X = [\n", "]\n"),
        ("def f():\n  return torch.tensor((\n", "), dtype=torch.half)\n"),
        ("X = f([[\n", "], 1], [2])\n"),
        ("X = {'a': [\n", "], 'b': 2}\n"),
    ],
)
def test_what_is_left_out_are_elements_and_what_follows_keeps_its_place(row: str, before: str, after: str):
    data = long_text([row], before, f"{after}last = 1\n")
    shorter = thinned(data, SHORT)
    assert (len(shorter), shorter.count(b"\n")) == (len(data), data.count(b"\n"))
    assert len(shorter.split()) < len(data.split()) / 2
    old, new = ast.parse(data), ast.parse(shorter)
    assert [(each.lineno, each.end_lineno) for each in new.body] == [
        (each.lineno, each.end_lineno) for each in old.body
    ]
    assert [type(each) for each in new.body] == [type(each) for each in old.body]


@pytest.mark.parametrize("seed", range(12))
def test_any_table_stays_one_of_fewer_elements(seed: int):
    chance = random.Random(seed)

    def table(depth: int) -> list[object]:
        return [
            table(depth - 1) if depth and chance.random() < 0.7 else chance.choice([0, -7, 2.5, 1e-9, 12345])
            for _ in range(chance.randrange(9))
        ]

    data = long_text([repr(table(4)) for _ in range(5)], f"X = {'[' * (seed % 3)}[\n", f"]{']' * (seed % 3)}\n")
    shorter = thinned(data, SHORT)
    assert len(shorter.split()) < len(data.split()) / 10
    old, new = (ast.literal_eval(each.decode()[4:]) for each in (data, shorter))
    assert part_of(new, old)


def part_of(one: object, other: object) -> bool:
    """Whether a table is another one without some elements of its lists."""
    if not isinstance(one, list):
        return one == other
    if not isinstance(other, list):
        return False
    rest = iter(other)
    return all(any(part_of(each, candidate) for candidate in rest) for each in one)


def test_what_is_no_table_is_read_as_it_stands():
    names = long_text(["[a, b]", "f(1)", "'x'", "e1"])
    assert thinned(names, SHORT) == names
    assert thinned(b"X = [1, 2]\n" * 10) == b"X = [1, 2]\n" * 10
    statements = b"if y:\n" + b"  1,\n" * (LONG // 4) + b"y = 1\n"  # each line a statement of its own
    assert isinstance(parse(statements).body[-1], ast.Assign)


def test_faults_around_a_table_are_found_where_they_stand(tmp_path: Path):
    table = long_text(["0.5, 1, 2"], long=LONG).decode()
    assert len(ast.dump(parse(table.encode()))) < 100_000
    program = tmp_path / "train.py"
    program.write_text(f"{table}{CLIP}\n{table.replace('X', 'Y')}")
    (finding,) = precisionlint.check(str(program), isolated=True).findings
    assert (finding.rule, finding.place.line) == ("clip-before-unscale", table.count("\n") + CLIP_LINE)
    program.write_text(f"{table}def broken(:\n")
    (error,) = precisionlint.check(str(program), isolated=True).errors
    assert (error.line, error.message) == (table.count("\n") + 1, "syntax error: invalid syntax")
