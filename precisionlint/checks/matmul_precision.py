"""How fp32 matrix products run: torch leaves the tensor cores unused for them unless a program says otherwise."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen
from precisionlint.events import Event, Op, Opened, Owns, Setting, Step, Weights, WeightsTake, covers

SWITCHES = ("float32_matmul_precision", "allow_tf32", "fp32_precision")


@dataclass(frozen=True, slots=True)
class Program:
    """What is known of the program: it runs on CUDA, which modules ran in fp32, and which weights are half."""

    cuda: bool = False
    at: Any = field(compare=False, default=None)
    ran: frozenset[Ran] = frozenset()
    half: Weights = frozenset()
    made: frozenset[Hashable] = frozenset()


@dataclass(frozen=True, slots=True)
class Ran:
    """A module that ran outside every half region."""

    module: Hashable
    seen: Seen = field(compare=False)


def advance(program: Program, event: Event) -> Program:
    if isinstance(event, Opened):
        return replace(program, cuda=event.device == "cuda" and event.at is not None, at=event.at)
    if isinstance(event, Owns):
        return replace(program, made=program.made | {event.optimizer.id})
    if not program.cuda:
        return program
    if isinstance(event, WeightsTake) and event.dtype is not None:
        half = frozenset(path for path in program.half if not covers(event.weights, frozenset({path})))
        return replace(program, half=half | event.weights if event.dtype in ("float16", "bfloat16") else half)
    if isinstance(event, Op) and event.family == "module" and event.dtypes[0] is None:
        path = event.inputs[0]
        assert isinstance(path, tuple)
        if not covers(program.half, frozenset({path})):
            return replace(program, ran=program.ran | {Ran(path, Seen(event.at, "runs in fp32", event.when))})
    return program


def settle(program: Program) -> Program:
    return replace(program, ran=frozenset())


FAMILY = Family(Automaton("matmul-precision", Program(), advance, settle))


@FAMILY.rule("tf32-off", Op, Setting, Step)
def tf32_off(program: Program, event: Op | Setting | Step) -> Iterator[Any]:
    if isinstance(event, Op):
        if event.dtypes[0] is not None:
            yield Evidence(("half", event.inputs[0]))
    elif isinstance(event, Setting):
        if any(event.name.endswith(switch) for switch in SWITCHES):
            yield Evidence("matmul precision")
    elif program.cuda and event.optimizer.id in program.made:
        for ran in program.ran:
            yield Hit(
                "tf32-off",
                program.at,
                "this CUDA program trains in fp32 and never sets the matmul precision: its products run outside the TF32 tensor cores (67 of 495 "
                'TFLOP/s on an H100); torch.set_float32_matmul_precision("high") turns them on, "highest" says that they stay off',
                (ran.seen, Seen(event.at, "the optimizer steps", event.when)),
                unless=("matmul precision", ("half", ran.module)),
            )
