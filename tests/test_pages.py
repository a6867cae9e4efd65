"""The pages of the catalogue keep their word: examples give the findings they mark, experiments print what is shown."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments import Worker

from precisionlint import catalogue
from precisionlint.catalogue import Example, Rule

RULES = catalogue.load()
SECTIONS = [
    "What goes wrong",
    "Wrong",
    "Right",
    "Experiment",
    "When it is certain, when likely",
    "Sources",
]
PUBLISHED = {
    "fp16-without-scaler": [
        "| 1e-8 | 0.0 | 1.0011717677116394e-08 | 9.997165761888027e-09 |",
        "| 1e-6 | 1.0132789611816406e-06 | 9.98377799987793e-07 |",
        "| 2e-5 | 2.002716064453125e-05 | 2.002716064453125e-05 |",
        "1e-08 0.0 1.0011717677116394e-08",
        "1e-06 1.0132789611816406e-06 9.98377799987793e-07",
        "2e-05 2.002716064453125e-05 2.002716064453125e-05 9.997165761888027e-09",
    ],
    "scaler-settings": ["defaults, after one inf: 32768.0", "`init_scale=65536`", "`growth_interval=2000`"],
    "bf16-only-weights": [
        "bf16  1.0 + 1000 x 1e-3 = 1.0000   0.02 - 1000 x 3e-5 = 0.0200",
        "fp16  1.0 + 1000 x 1e-3 = 1.9766",
        "fp32  1.0 + 1000 x 1e-3 = 2.0000   0.02 - 1000 x 3e-5 = -0.0100",
        "fp16  1.0 + 10000 x 1e-3 = 4.0000",
        "2 + 2 + 4 + 4 + 4 = 16",
    ],
    "tf32-off": ["67 TFLOP/s", "495 with TF32", "989 with bf16", "1979 with fp8"],
}
"""Numbers that are published elsewhere too, and that these pages reproduce or quote."""


def examples() -> list[tuple[Rule, Example]]:
    return [(rule, example) for rule in RULES.values() for example in catalogue.examples(rule)]


def name_of(value: object) -> str | None:
    if isinstance(value, Rule):
        return value.name
    return f"{value.kind}-at-{value.line}" if isinstance(value, Example) else None


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize(("rule", "example"), examples(), ids=name_of)
def test_check_finds_in_an_example_exactly_what_it_marks_and_check_can_read(
    rule: Rule, example: Example, tmp_path: Path
):
    from precisionlint import check

    program = tmp_path / f"train{example.suffix}"
    program.write_text(example.code, encoding="utf-8")
    report = check([str(program)], select=frozenset(RULES), assume={})
    assert not report.errors
    found = sorted((finding.place.line, finding.rule) for finding in report.findings)
    marks = sorted((line, name) for line, name in example.marks if "check" in RULES[name].found_by)
    assert found == ([] if example.measured else marks), "\n".join(str(finding) for finding in report.findings)


@pytest.mark.parametrize("rule", RULES.values(), ids=name_of)
def test_an_experiment_prints_what_stands_on_the_page(rule: Rule, worker: Worker):
    experiment = catalogue.experiment(rule)
    assert experiment is not None
    assert worker.run(experiment.code) == experiment.output


@pytest.mark.parametrize("rule", RULES.values(), ids=name_of)
def test_a_page_has_its_title_and_all_sections_in_order(rule: Rule):
    prose = re.sub(r"^```.*?^```$", "(a block)", catalogue.body(rule), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^# (.*)$", prose, re.MULTILINE) == [rule.name]
    assert re.findall(r"^## (.*)$", prose, re.MULTILINE) == SECTIONS
    assert all(section.strip() for section in re.split(r"^## .*$", prose, flags=re.MULTILINE)[1:])


@pytest.mark.parametrize("rule", RULES.values(), ids=name_of)
def test_a_page_shows_its_own_fault_and_sound_code(rule: Rule):
    shown = catalogue.examples(rule)
    for example in shown:
        if example.language == "python":
            ast.parse(example.code)
        marked = {name for _, name in example.marks}
        assert marked <= RULES.keys()
        assert bool(marked) == (example.kind == "wrong"), f"{rule.page}:{example.line}"
    assert any(rule.name in dict(map(reversed, example.marks)) for example in shown)
    assert any(example.kind == "right" for example in shown)


@pytest.mark.parametrize("rule", RULES.values(), ids=name_of)
def test_the_links_of_a_page_lead_somewhere(rule: Rule):
    for target in re.findall(r"\]\(([^)]+\.md)\)", catalogue.body(rule)):
        assert (rule.page.parent / target).resolve().stem in RULES


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_stand_on_their_pages(name: str):
    page = " ".join(catalogue.body(RULES[name]).split())
    assert [number for number in PUBLISHED[name] if " ".join(number.split()) not in page] == []


def test_each_rule_that_is_found_has_what_finds_it_and_each_of_those_a_page():
    from precisionlint.checks import RULES as CHECKS
    from precisionlint.suppress import RULES as COMMENTS
    from precisionlint.trace.verdicts import RULES as VERDICTS

    measured = {rule.name for rule in RULES.values() if any(example.measured for example in catalogue.examples(rule))}
    only_measured = {rule.name for rule in RULES.values() if rule.found_by == ("audit",)} | measured
    assert only_measured <= VERDICTS.keys() <= {rule.name for rule in RULES.values() if "audit" in rule.found_by}
    assert sorted((*CHECKS, *COMMENTS)) == sorted(rule.name for rule in RULES.values() if "check" in rule.found_by)
