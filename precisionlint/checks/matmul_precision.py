"""How fp32 matrix products run: torch leaves the tensor cores unused for them unless a program says otherwise."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from msgspec.structs import replace

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen
from precisionlint.checks.tf32_switches import CUDNN, FLAGS, GET, MATMUL, NEW, SET, Switches
from precisionlint.events import (
    Adopted,
    Backward,
    Event,
    Known,
    Op,
    Opened,
    Owns,
    Setting,
    Sharded,
    Step,
    Weights,
    WeightsTake,
    covers,
    moved,
    overlap,
)
from precisionlint.findings import Confidence
from precisionlint.records import Record
from precisionlint.valueflow import Called, Ended, Touched

SWITCHES = ("float32_matmul_precision", "allow_tf32", "fp32_precision")
TWO_FAMILIES = ">=2.9"
"""The versions of torch that keep the new switches beside the old ones."""

AT_START = Switches()
"""The TF32 switches as torch begins."""


class Program(Record, frozen=True, eq=False):
    """What is known of the program: it runs on CUDA, which modules ran in fp32, and which weights are half.

    ``switches``: the TF32 switches as the function at hand has them, ``top``: as the file's top level leaves them, ``left``: as each
    function that sets a new one does, and where; ``modern``: where one was set last; ``reads``: the old getters that this function has
    read without harm, ``earlier``: those that other functions have.
    """

    aside: ClassVar[tuple[str, ...]] = ("at", "modern", "left", "reads", "earlier")

    cuda: bool = False
    at: Any = None
    ran: frozenset[Ran] = frozenset()
    half: Weights = frozenset()
    made: frozenset[Hashable] = frozenset()
    switches: Switches = AT_START
    top: Switches = AT_START
    modern: Seen | None = None
    left: tuple[tuple[Switches, Seen], ...] = ()
    reads: tuple[tuple[str, Any], ...] = ()
    earlier: tuple[tuple[str, Any], ...] = ()


class Ran(Record, frozen=True, eq=False):
    """A module that ran outside every half region."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    module: Hashable
    seen: Seen


HEARS = (Opened, Owns, Touched, Called, Ended, Sharded, WeightsTake, Adopted, Op)


def advance(program: Program, event: Event) -> Program:
    if isinstance(event, Opened):
        return replace(program, cuda=event.device == "cuda" and event.at is not None, at=event.at)
    if isinstance(event, Owns):
        return replace(program, made=program.made | {event.optimizer.id})
    if isinstance(event, (Touched, Called)):
        return switched(program, event)
    if isinstance(event, Ended):
        return at_end(program)
    if not program.cuda:
        return program
    if isinstance(event, Sharded) and event.policy:  # in whose dtype it computes; of which weights is not always known
        return replace(program, half=program.half | (event.weights or frozenset()), cuda=event.weights is not None)
    if isinstance(event, WeightsTake) and event.dtype is not None:
        half = frozenset(path for path in program.half if not covers(event.weights, frozenset({path})))
        return replace(program, half=half | event.weights if event.dtype in ("float16", "bfloat16") else half)
    if isinstance(event, Adopted):
        return replace(program, half=moved(program.half, event))
    if isinstance(event, Op) and event.family == "module" and event.dtypes[0] is None:
        path = event.inputs[0]
        assert isinstance(path, tuple)
        if not overlap(program.half, frozenset({path})):
            return replace(program, ran=program.ran | {Ran(path, Seen(event.at, "runs in fp32", event.when))})
    return program


def settle(program: Program) -> Program:
    return replace(program, ran=frozenset())


FAMILY = Family(Automaton("matmul-precision", Program(), advance, settle, hears=HEARS))


@FAMILY.rule("tf32-off", Op, Setting, Step, Backward)
def tf32_off(program: Program, event: Op | Setting | Step | Backward) -> Iterator[Any]:
    if isinstance(event, Backward):
        yield from of_another_file(program, event)
    elif isinstance(event, Op):
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
                "this CUDA program has a model run in fp32 and never sets the matmul precision: its products run outside the TF32 tensor cores "
                '(67 of 495 TFLOP/s on an H100); torch.set_float32_matmul_precision("high") turns them on, "highest" says that they stay off',
                (ran.seen, Seen(event.at, "the optimizer steps", event.when)),
                unless=("matmul precision", ("half", ran.module)),
            )


def of_another_file(program: Program, event: Backward) -> Iterator[Any]:
    """A backward that nothing in the program makes half, of a model or an optimizer that another file makes."""
    scaled = event.scale is not None and event.scale != Known(None)
    if scaled or event.loss_region or event.open_region or event.engine or program.half:
        yield Evidence("half")
    elif program.cuda and event.scale is not None:
        yield Hit(
            "tf32-off",
            program.at,
            "nothing in this CUDA program makes its training half, and it never sets the matmul precision: fp32 products run outside the TF32 "
            'tensor cores (67 of 495 TFLOP/s on an H100); torch.set_float32_matmul_precision("high") turns them on',
            (Seen(event.at, "gradients of a loss outside every half region", event.when),),
            confidence="possible",
            unless=("matmul precision", "half"),
        )


def switched(program: Program, event: Touched | Called) -> Program:
    """What is known of the TF32 switches after one of them was set or read."""
    name, value = setting(event)
    read = getter(event)
    if read and not event.scope.guarded:
        return replace(program, reads=(*program.reads, (read, event.at)))
    switches = program.switches.set(name, value)
    if switches == program.switches:
        return program
    top = switches if event.scope.function == "" else program.top
    modern = Seen(event.at, f"{name} is set to {value!r}") if name in NEW else program.modern
    return replace(program, switches=switches, top=top, modern=modern)


def at_end(program: Program) -> Program:
    """What a function leaves is kept for readings in other functions, whose order the file does not tell."""
    left = program.left
    if program.modern is not None and program.switches != program.top:
        left = (*left, (program.switches, program.modern))
    return replace(program, switches=program.top, left=left, reads=(), earlier=(*program.earlier, *program.reads))


def setting(event: Touched | Called) -> tuple[str, object]:
    """(the switch, what it is set to); the name is empty where nothing is set."""
    if isinstance(event, Touched):
        return (event.name, event.value.constant) if event.value is not None else ("", None)
    value = event.value.option("precision", 0)
    return (SET, value.constant if value is not None else None) if event.value.name == SET else ("", None)


def getter(event: Touched | Called) -> str:
    """The old getter that an event is, or an empty name."""
    if isinstance(event, Called):
        return event.value.name if event.value.name in (GET, FLAGS) else ""
    return event.name if event.value is None and event.name in (MATMUL, CUDNN) else ""


@FAMILY.rule("tf32-legacy-api", Touched)
def tf32_legacy_api(state: Program, event: Touched) -> Iterator[Any]:
    if event.name in (MATMUL, CUDNN) and not event.scope.guarded:
        new = event.name.replace("allow_tf32", "fp32_precision").replace("cudnn.", "cudnn.conv.")
        also = " (and cudnn.rnn's)" if event.name == CUDNN else ""
        yield Hit(
            "tf32-legacy-api",
            event.at,
            f"{event.name} is the switch of before torch 2.9: {new}{also} takes its place, 'tf32' or 'ieee'; "
            "change all of them at once, the two must not be mixed",
            (),
            torch=TWO_FAMILIES,
        )


@FAMILY.rule("tf32-api-mixed", Touched, Called, Ended)
def tf32_api_mixed(state: Program, event: Touched | Called | Ended) -> Iterator[Any]:
    """An old getter is read while the new switches say something else."""
    if isinstance(event, Ended):
        for name, at in state.earlier:
            value = state.switches.clash(name)
            if value is not None and state.modern is not None and state.switches != state.top:
                yield mixed(at, name, value, state.modern, "likely")
        return
    name = getter(event)
    if not name or event.scope.guarded:
        return
    value = state.switches.clash(name)
    if value is not None and state.modern is not None:
        yield mixed(event.at, name, value, state.modern, "certain")
        return
    for switches, seen in state.left:
        value = switches.clash(name)
        if value is not None:
            yield mixed(event.at, name, value, seen, "likely")
            return


def mixed(at: Any, name: str, value: str, modern: Seen, confidence: Confidence) -> Hit:
    return Hit(
        "tf32-api-mixed",
        at,
        f"{name} is read while the new switches say {value!r} and the old ones do not: torch 2.9 and later raise RuntimeError here; "
        "read fp32_precision instead",
        (modern,),
        confidence=confidence,
        torch=TWO_FAMILIES,
    )
