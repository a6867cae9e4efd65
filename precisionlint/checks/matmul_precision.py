"""How fp32 matrix products run: torch leaves the tensor cores unused for them unless a program says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen
from precisionlint.events import Backward, Event, Opened, Setting, Step, WeightsTake

SWITCHES = ("float32_matmul_precision", "allow_tf32", "fp32_precision")


@dataclass(frozen=True, slots=True)
class Program:
    """What is known of the program: it runs on CUDA, and whether a plain fp32 backward was seen."""

    cuda: bool = False
    set: bool = False
    at: Any = field(compare=False, default=None)
    backward: Seen | None = field(compare=False, default=None)
    trained: bool = False


def advance(program: Program, event: Event) -> Program:
    if isinstance(event, Opened):
        return Program(event.complete and event.device == "cuda", event.precision_set, event.at)
    if isinstance(event, Setting) and any(event.name.endswith(switch) for switch in SWITCHES):
        return replace(program, set=True)
    if isinstance(event, Backward) and event.loss_region is None and not program.trained:
        return replace(program, trained=True, backward=Seen(event.at, "backward of a loss computed in fp32", event.when))
    return program


FAMILY = Family(Automaton("matmul-precision", Program(), advance))


@FAMILY.rule("tf32-off", Step, Backward, WeightsTake, Setting)
def tf32_off(program: Program, event: Event) -> Iterator[Any]:
    if isinstance(event, Backward):
        if event.loss_region is not None:
            yield Evidence("half matmuls")
    elif isinstance(event, WeightsTake):
        if event.dtype in ("float16", "bfloat16"):
            yield Evidence("half matmuls")
    elif isinstance(event, Setting):
        if any(event.name.endswith(switch) for switch in SWITCHES):
            yield Evidence("matmul precision")
    elif program.cuda and program.trained and not program.set and program.backward is not None:
        yield Hit(
            "tf32-off",
            program.at,
            "this fp32 CUDA program never sets the matmul precision: products run outside the TF32 tensor cores (67 of 495 TFLOP/s on an H100); "
            'torch.set_float32_matmul_precision("high") turns them on, or say "highest" to keep it so',
            (program.backward, Seen(event.at, "the optimizer steps", event.when)),
            unless=("half matmuls", "matmul precision"),
        )
