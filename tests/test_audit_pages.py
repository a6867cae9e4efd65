"""The pages' examples, run on the CPU under the audit: what `check` reads in them is measured at the same lines.

Only examples that are a ``train(loader)`` of pairs run here; faults that need another run (a scaler rebuilt each
epoch) or a GPU are not measured, so their marks are left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import precisionlint
from precisionlint import catalogue
from precisionlint.audit_judging import MEASURED
from precisionlint.catalogue import Example, Rule
from precisionlint.trace.verdicts import RULES as VERDICTS

BATCHES = 5
KNOWN = (MEASURED - {"scaler-with-bf16"}) | VERDICTS.keys() | {"half-gradient-norm"}
"""What the audit must find where it is marked, and nowhere else; a scaler over bf16 is no fault on the CPU."""
OTHER_DATA = (
    "if not torch.isfinite(norm):",
    "nn.Embedding",
    "nn.MSELoss",
    "mse_loss",
    "LinearFunction",
    "SummaryWriter",
)
"""Lines of examples whose fault, or whose model, needs data that is not made here."""
UNSEEN = ("set_default_dtype",)
"""Lines of examples whose fault stands where nothing of the run's can be placed."""


ELSEWHERE = {"ranks-differ"}
"""Rules whose examples need several processes; test_audit_ranks.py runs them."""


def examples() -> list[tuple[Rule, Example]]:
    return [
        (rule, example)
        for rule in catalogue.load().values()
        for example in catalogue.examples(rule)
        if "audit" in rule.found_by
        and example.language == "python"
        and re.search(r"^def train\(\w+\):", example.code, re.MULTILINE)
        and re.search(r"for (\w+, )?\(?x, y\)? in ", example.code)
        and set(re.findall(r"^(?:from|import) (\w+)", example.code, re.MULTILINE)) <= {"torch", "copy"}
        and "distributed" not in example.code
        and not any(line in example.code for line in (*OTHER_DATA, *UNSEEN))
    ]


def on_the_cpu(code: str) -> str:
    for old, new in (
        ("torch.cuda.amp.GradScaler(", 'torch.amp.GradScaler("cpu", '),
        ("torch.cuda.amp.autocast(", 'torch.autocast("cpu", '),
        (".cuda()", ""),
        ('"cuda"', '"cpu"'),
    ):
        code = code.replace(old, new)
    return re.sub(r"\brange\(\d+\)", "range(2)", code)  # two epochs tell as much as ten


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Puts back what an example sets for the whole process."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)


def name_of(value: object) -> str | None:
    if isinstance(value, Rule):
        return value.name
    return f"{value.kind}-at-{value.line}" if isinstance(value, Example) else None


def test_enough_examples_run_to_mean_something():
    assert len(examples()) >= 80
    assert len({rule.name for rule, example in examples() if example.kind == "wrong"} & MEASURED) >= 7


@pytest.mark.parametrize("name", sorted(VERDICTS.keys() - ELSEWHERE))
def test_all_examples_of_a_rule_with_a_verdict_are_run_where_one_process_is_enough(name: str):
    rule = catalogue.load()[name]
    programs = [example for example in catalogue.examples(rule) if example.language == "python"]
    whole = [example for example in programs if "\ndef train(" in example.code]  # a class alone is only read
    alone = [example for example in whole if "distributed" not in example.code]
    assert alone
    assert [each for of, each in examples() if of == rule] == alone
    assert (rule.family, rule.severity) == VERDICTS[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rule", "example"), examples(), ids=name_of)
def test_an_example_is_measured_at_the_lines_that_it_marks(
    rule: Rule, example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # an example may save a checkpoint
    path = tmp_path / "train.py"
    path.write_text(on_the_cpu(example.code))
    program: dict[str, object] = {"__name__": "example"}
    exec(compile(path.read_text(), str(path), "exec"), program)
    train = program["train"]
    assert inspect.isfunction(train)
    sizes = [(int(into), int(out)) for into, out in re.findall(r"nn\.Linear\((\d+), (\d+)", example.code)]
    width, classes = (sizes[0][0], min(out for _, out in sizes)) if sizes else (64, 10)
    loader = [(torch.randn(8, width), torch.randint(0, classes, (8,))) for _ in range(BATCHES)]
    with precisionlint.audit(values=rule.name == "first-overflow") as audit:
        try:
            train(loader)
        except (RuntimeError, ValueError, AssertionError) as error:  # what the fault itself leads to
            assert example.kind == "wrong", error
    found = {(each.place.line, each.rule) for each in audit.report.findings if each.rule in KNOWN}
    assert found == {(line, name) for line, name in example.marks if name in KNOWN}
