"""What torch.compile runs is named in the report, and is measured where it runs uncompiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from audit_cases import batch, net
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import precisionlint
from precisionlint.audit_report import AuditReport

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own while it compiles
]
COMPILES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch compiles while a dispatch mode is on."""
Made = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def unbroken(model: nn.Module) -> nn.Module:
    return torch.compile(model, fullgraph=True)  # type: ignore[return-value]


def in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


class Unregistered(nn.Module):
    """A module that no model holds: it is met when it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0](x)  # type: ignore[no-any-return]


def unknown(model: nn.Module) -> nn.Module:
    return torch.compile(Unregistered(model), fullgraph=True)  # type: ignore[return-value]


def part(model: nn.Module) -> nn.Module:
    model.norm = torch.compile(model.norm)  # type: ignore[assignment]
    return model


def function(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.compile
    def predict(x: torch.Tensor) -> torch.Tensor:
        return model(x)  # type: ignore[no-any-return]

    return predict


def audited(make: Made, *, within: bool = False) -> tuple[AuditReport, int]:
    """The report of a step, and how many half products it saw; ``within``: compiled in the window itself."""
    torch._dynamo.reset()
    model = net()
    run = None if within else make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    with precisionlint.audit(model, optimizer) as audit:
        run = make(model) if run is None else run
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run(x)
        functional.cross_entropy(logits.float(), y).backward()
        optimizer.step()
    return audit.report, sum(op.count for op in audit.report.ops if op.family == "normalisation")


NAMES = {
    whole: "Net",
    unbroken: "Net",
    in_place: "Net",
    part: "LayerNorm",
    unknown: "Unregistered",
    function: "predict",
}


@pytest.mark.parametrize("make", NAMES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("within", [False, True], ids=["before", "within"])
def test_a_compiled_region_is_named_with_its_line_and_is_no_silent_ok(make: Made, within: bool):
    report, norms = audited(make, within=within)
    (region,) = report.compiled
    assert region.what == NAMES[make] and region.place is not None
    assert region.place.path.endswith("audit_cases.py" if make is part else "test_audit_compiled.py")
    assert norms == 0 or not COMPILES  # the compiler's own kernels
    (note,) = [each for each in report.notes if "compiled" in each]
    assert note.startswith(
        f"{NAMES[make]} ran compiled at {region.place.where}, once: of what its compiler fuses nothing"
    )


@pytest.mark.parametrize("make", NAMES, ids=lambda each: each.__name__)
def test_run_uncompiled_it_is_seen_and_named_as_measured_so(make: Made):
    with torch.compiler.set_stance("force_eager"):
        report, norms = audited(make)
    assert report.compiled == () and norms > 0
    (note,) = [each for each in report.notes if "compiled" in each]
    assert note.startswith(f"{NAMES[make]} would run compiled at ") and "measured uncompiled, once" in note


def test_the_verdict_says_that_a_region_was_not_seen():
    from precisionlint.report.audit_text import render

    first = next(iter(render(audited(whole)[0])))
    assert first == "audit: found nothing, but did not see inside 1 compiled region (see notes)"


def test_a_step_without_compiled_regions_says_nothing_of_them():
    report, norms = audited(lambda model: model)
    assert report.compiled == () and norms > 0
    assert not any("compiled" in note for note in report.notes)
