"""Work that no dispatcher sees is named: Triton launches, and tensors that were read though no op had written them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_cases import marked

import precisionlint

LAUNCH = """\
import json, torch, triton
import triton.language as tl
import precisionlint

@triton.jit
def double(x, y, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(x + at).to(tl.float32) * 2)

class Doubling(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x).detach().reshape(-1)
        y = torch.empty(16)
        double[(1,)](x, y, 16)  # the launch
        return y + 1

linear = Doubling(8, 8)
with precisionlint.audit(linear) as audit:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(torch.ones(2, 8))
    linear(torch.ones(2, 8))
    linear(torch.ones(2, 8))
print(json.dumps(audit.report.to_dict()))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("launch")
    (folder / "launch.py").write_text(LAUNCH)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "launch.py"], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_triton_launch_in_a_region_that_takes_half_is_a_finding_at_its_line(launched: Any):
    line = LAUNCH[: LAUNCH.index("# the launch")].count("\n") + 1
    assert [(each["rule"], each["line"]) for each in launched["findings"]] == [("unregistered-custom-op", line)]


def test_every_launch_is_counted_as_an_op_of_its_module_with_what_it_took(launched: Any):
    kernels = [op for op in launched["ops"] if op["op"] == "triton::double"]
    assert [(op["phase"], op["module"], op["inputs"], op["accumulation"], op["count"]) for op in kernels] == [
        ("forward", "Doubling", ["bfloat16", "float32"], "unknown", 1),
        ("forward", "Doubling", ["float32", "float32"], "unknown", 2),
    ]
    assert launched["notes"] == ["Triton kernel 'double' was launched 3 times: what it computes in is not seen"]


def test_what_the_interpreter_does_with_torch_for_a_launch_is_not_counted(launched: Any):
    assert not {"set_", "new_empty"} & {op["op"] for op in launched["ops"]}


def notes(step: Callable[[], object]) -> list[str]:
    with precisionlint.audit() as audit:
        step()
    return list(audit.report.notes)


def test_a_tensor_that_is_read_though_no_op_had_written_it_is_named_with_both_lines():
    def step() -> None:
        y = torch.empty(4)  # <- made
        y.numpy()[:] = 1.0  # as an extension writes
        y + 1  # <- read

    (said,) = notes(step)
    assert f"test_audit_unseen.py:{marked(step, '<- read')} reads" in said
    assert f"test_audit_unseen.py:{marked(step, '<- made')}" in said


def filled() -> None:
    torch.empty(4).fill_(1.0).add(1.0)


def written_through_a_view() -> None:
    y = torch.empty(4, 4)
    y[1:].zero_()
    y.sum()


def given_as_out() -> None:
    y = torch.empty(4)
    torch.add(torch.ones(4), 1.0, out=y)
    y.sum()


def drawn() -> None:
    torch.empty(4).uniform_().sum()


def filled_by_foreach() -> None:
    several = [torch.empty(2), torch.empty(2)]
    torch._foreach_zero_(several)
    torch._foreach_add(several, 1.0)


def only_its_shape() -> None:
    y = torch.empty(4)
    torch.zeros_like(y) + torch.ones(1).expand_as(y)


def of_no_elements() -> None:
    torch.cat([torch.empty(0), torch.ones(2)])


def of_a_buffer_made_before() -> None:
    BEFORE + 1


def of_integers() -> None:
    torch.empty(4, dtype=torch.int64) + 1


BEFORE = torch.empty(4)


@torch.library.custom_op("precisionlint_tests::fill_with_twos", mutates_args={"out"})
def fill_with_twos(out: torch.Tensor) -> None:
    out.numpy()[:] = 2.0


def written_by_a_custom_op() -> None:
    y = torch.empty(4)
    fill_with_twos(y)
    y + 1


@pytest.mark.parametrize(
    "step",
    [
        filled,
        written_through_a_view,
        given_as_out,
        drawn,
        filled_by_foreach,
        only_its_shape,
        of_no_elements,
        of_a_buffer_made_before,
        of_integers,
        written_by_a_custom_op,
    ],
    ids=lambda step: step.__name__,
)
def test_what_an_op_wrote_or_has_no_precision_is_not_named(step: Callable[[], None]):
    assert notes(step) == []


def test_a_storage_that_is_made_anew_at_the_same_place_is_another_one():
    def step() -> None:
        for _ in range(50):
            torch.empty(4)
            torch.ones(4) + 1

    assert notes(step) == []


def test_paths_are_those_of_the_working_directory(tmp_path: Path):
    source = "import torch, precisionlint\nwith precisionlint.audit() as audit:\n    y = torch.empty(3)\n    y.exp()\n"
    (tmp_path / "train.py").write_text(source + "print(audit.report.notes[0])\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("exp at train.py:4 reads a tensor that was made empty at train.py:3,"), done.stderr
