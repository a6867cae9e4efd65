"""Turns what a window recorded into a report: ids into names, bytecode offsets into lines, events into sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from msgspec import Struct

from precisionlint import policy
from precisionlint.audit_report import (
    ActivationRecord,
    AuditReport,
    CastRecord,
    OpRecord,
    Station,
    UpdateRecord,
)
from precisionlint.events import (
    Autocast,
    Backward,
    Collective,
    CustomOp,
    Event,
    Grads,
    LossScaled,
    Owns,
    ScalerMade,
    SchedulerStep,
    Step,
    Update,
    WeightsTake,
    ZeroGrad,
)
from precisionlint.findings import Place
from precisionlint.policy import Policy
from precisionlint.trace import settings as global_settings
from precisionlint.trace import verdicts
from precisionlint.trace.activations import Activations
from precisionlint.trace.averages import Averages
from precisionlint.trace.casts import Casts
from precisionlint.trace.compiled import Compiled
from precisionlint.trace.dataflow import Dataflow
from precisionlint.trace.order import Order
from precisionlint.trace.places import place
from precisionlint.trace.ranges import Ranges
from precisionlint.trace.recorder import Kernel, Recorder
from precisionlint.trace.registry import Registry
from precisionlint.trace.storage import Storage
from precisionlint.trace.sums import Sums
from precisionlint.trace.timeline import Timeline, as_finding
from precisionlint.trace.underflow import Epsilon, Underflow
from precisionlint.trace.unseen import Unseen
from precisionlint.trace.updates import Updates
from precisionlint.trace.values import NonFinite

OTHER_BACKWARD = frozenset({"prod"})
"""Ops whose backward computes otherwise when any dispatch mode is on. Measured: prod does; sum, cumprod, norm,
logsumexp, std and var do not, nor does any op of the models in the tests.
"""


class Measures(Struct, frozen=True):
    """What a window holds in the end."""

    recorder: Recorder
    registry: Registry
    timeline: Timeline
    order: Order
    casts: Casts
    storage: Storage
    activations: Activations
    updates: Updates
    flow: Dataflow
    averages: Averages
    sums: Sums
    underflow: Underflow
    epsilons: Mapping[int, Epsilon]
    """Optimizer's ``id`` -> what became of its eps."""
    unseen: Unseen
    compiled: Compiled
    ranges: Ranges
    first: NonFinite | None


def summarize(
    held: Measures,
    *,
    select: frozenset[str],
    fallback: Place,
    name: str,
    before: Mapping[str, str],
    settings: Mapping[str, str],
    table: Policy,
    complete: bool,
    error: str,
) -> AuditReport:
    """The report of a closed window; ``before``: the settings when it was opened."""
    recorder, registry, events = held.recorder, held.registry, held.timeline.events
    ops = tuple(_ops(recorder, registry, table, settings))
    trained = any(isinstance(event, Backward) for event in events)
    findings = verdicts.merged(
        [
            *(as_finding(hit, fallback) for hit in held.timeline.hits(select)),
            *verdicts.of_dataflow(held.flow, recorder, trained),
            *verdicts.of_values(held.first, recorder, registry, fallback),
            *verdicts.of_products(ops),
            *verdicts.of_gradients(ops, events),
            *verdicts.of_state(registry, events),
            *verdicts.of_updates(held.updates.lost, registry, events),
            *verdicts.of_averages(held.averages, recorder),
            *verdicts.of_sums(held.sums, recorder),
            *verdicts.of_underflow(held.underflow, recorder, held.order.scale),
            *verdicts.of_epsilons(held.epsilons, registry, events),
            *verdicts.of_scales(held.order.collapsed),
        ]
    )
    return AuditReport(
        name=name,
        findings=tuple(findings),
        ops=ops,
        order=tuple(_stations(events)),
        objects=tuple(_objects(events)),
        casts=tuple(_casts(held.casts, recorder, registry)),
        storage=tuple(held.storage.records()),
        activations=tuple(_activations(held.activations, registry)),
        updates=tuple(_updates(held.updates, registry)),
        gradients=held.ranges.record(held.order.scale),
        notes=(*global_settings.changed(before, settings), *_notes(held)),
        settings=settings,
        meaning=tuple(global_settings.meaning(settings, ops)),
        regions=tuple(_regions(events)),
        compiled=(
            *(Station(region, at) for region, at in held.compiled.regions),
            *(Station("a CUDA graph", at) for at in held.compiled.replays),
        ),
        absent=tuple(registry.births.absent),
        steps=held.order.steps,
        complete=complete,
        error=error,
    )


def _ops(recorder: Recorder, registry: Registry, table: Policy, settings: Mapping[str, str]) -> Iterable[OpRecord]:
    family_of = cache(table.family)
    for (number, phase, origin, parameter, device, inputs, outputs), cell in recorder.counts.items():
        name = op_name(recorder.ops[number])
        made = recorder.origins[origin]
        module = registry.module_label(made.module)
        into, out = tuple(map(dtype_name, inputs)), tuple(map(dtype_name, outputs))
        if not out and name.endswith("_"):
            out = into[:1]  # it returns nothing and writes its first argument
        family = family_of(name, phase)
        if family is not None and not any(each in policy.RANKS for text in (*into, *out) for each in text.split("|")):
            family = None  # no floating point number takes part
        kernel = isinstance(recorder.ops[number], Kernel)
        accumulated = policy.UNKNOWN if kernel else policy.accumulation(family, device, into, out, settings)
        requires = policy.Requirement() if family is None else table.requirement(family, name, module)
        yield OpRecord(
            op=name,
            phase=phase,
            module=module,
            place=None if made.code is None else place(made.code, made.offset),
            inputs=into,
            accumulation=accumulated,
            outputs=out,
            count=cell.count,
            flops=cell.flops,
            parameter="" if parameter is None else registry.label(parameter),
            family="kernel" if kernel else "" if family is None else family.name,
            verdict=policy.shortfall(requires, into, accumulated, out),
            device=device,
        )


def _casts(casts: Casts, recorder: Recorder, registry: Registry) -> Iterable[CastRecord]:
    for (origin, phase, before, after), tally in casts.tallies.items():
        made = recorder.origins[origin]
        where = None if made.code is None else place(made.code, made.offset)
        yield CastRecord(
            phase,
            registry.module_label(made.module),
            where,
            dtype_name(before),
            dtype_name(after),
            tally.count,
            tally.bytes,
            tally.again,
            tally.back,
        )


def _updates(updates: Updates, registry: Registry) -> Iterable[UpdateRecord]:
    for each in updates.lost:
        label = registry.label(registry.parameter(each.parameter))
        yield UpdateRecord(label, dtype_name(each.parameter.dtype), each.meant, each.lost)


def _activations(activations: Activations, registry: Registry) -> Iterable[ActivationRecord]:
    for (module, dtype), (tensors, bytes_) in activations.kept.items():
        yield ActivationRecord(registry.module_label(module), dtype_name(dtype), tensors, bytes_)


def _notes(held: Measures) -> Iterable[str]:
    recorder, registry = held.recorder, held.registry
    ran = {op_name(recorder.ops[key[0]]) for key in recorder.counts if key[1] in ("forward", "recompute")}
    for name in sorted(ran & OTHER_BACKWARD):
        yield f"{name}: its backward takes another formula under any dispatch mode; gradients differ by about 1e-7"
    for (region, at), count in held.compiled.regions.items():
        yield (
            f"{region} ran compiled{_at(at)}, {_times(count)}: of what its compiler fuses nothing is seen, only products "
            "left to libraries; --eager, or torch.compiler.set_stance('force_eager'), runs it uncompiled"
        )
    for at, count in held.compiled.replays.items():
        yield f"a CUDA graph was replayed{_at(at)}, {_times(count)}: nothing of what it runs is seen"
    for (region, at), count in held.compiled.eager.items():
        yield (
            f"{region} would run compiled{_at(at)}, and was measured uncompiled, {_times(count)}: compiled, it may keep "
            "in fp32 what is rounded here"
        )
    for device, at in registry.births.absent.items():
        yield (
            f"this machine has no {device}: what was made for it{_at(at)} is off, and what the step does there was not "
            "measured"
        )
    for name, kernel in recorder.kernels.items():
        count = sum(cell.count for key, cell in recorder.counts.items() if key[0] == id(kernel))
        yield f"{kernel.namespace.capitalize()} kernel '{name}' was launched {_times(count)}: what it computes in is not seen"
    for each in held.unseen.written.values():
        yield (
            f"{each.op} at {_where(recorder, each.read)} reads a tensor that was made empty at "
            f"{_where(recorder, each.made)}, and no op had written it: a kernel that no dispatcher sees did (an "
            "extension, numpy), or nothing did"
        )
    if held.activations.unreadable:
        yield f"torch {torch.__version__} does not show what is saved for the backward: activations are not counted"
    for optimizer, why in held.updates.unmeasured.items():
        yield f"lost updates of {optimizer} were not measured: {why}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _at(place: Place | None) -> str:
    return "" if place is None else f" at {place.path}:{place.line}"


def _where(recorder: Recorder, origin: int) -> str:
    made = recorder.origins[origin]
    if made.code is None:
        return "an unknown line"
    at = place(made.code, made.offset)
    return f"{at.path}:{at.line}"


def op_name(func: Any) -> str:
    """``mm`` for aten's, ``namespace::name`` for all others."""
    if isinstance(func, Kernel):
        return f"{func.namespace}::{func.name}"
    name = func._overloadpacket.__name__
    return name if func.namespace == "aten" else f"{func.namespace}::{name}"


def dtype_name(dtype: torch.dtype | frozenset[torch.dtype]) -> str:
    """``bfloat16``, or ``bfloat16|float32`` for a list that mixes them."""
    if isinstance(dtype, frozenset):
        return "|".join(sorted(map(dtype_name, dtype)))
    return str(dtype).removeprefix("torch.")


def _regions(events: Iterable[Event]) -> list[str]:
    """The autocast regions entered, each once, with how often."""
    counts: dict[str, int] = {}
    for event in events:
        if isinstance(event, Autocast) and event.enter:
            if event.region is None:
                text = "disabled"
            else:
                cache = "" if event.region.cache else ", weight cache off"
                text = f"{event.region.device} {event.region.dtype}{cache}"
            where = f" at {event.at.path}:{event.at.line}" if event.at is not None else " before the window"
            counts[text + where] = counts.get(text + where, 0) + 1
    return [text if number == 1 else f"{text} ({number} times)" for text, number in counts.items()]


def _stations(events: Iterable[Event]) -> Iterable[Station]:
    for event in events:
        text = _sentence(event)
        if text and isinstance(event.at, Place):
            yield Station(text, event.at)


def _objects(events: Iterable[Event]) -> Iterable[Station]:
    for event in events:
        match event:
            case Owns(at=Place() as at, optimizer=optimizer, cls=cls):
                yield Station(f"'{optimizer.name}' made ({cls})", at)
            case ScalerMade(at=Place() as at, scaler=scaler, cls=cls):
                yield Station(f"'{scaler.name}' made ({cls})", at)
            case WeightsTake(at=Place() as at, dtype=str() as dtype):
                yield Station(f"weights take {dtype}", at)
            case CustomOp(at=Place() as at, defined=defined, name=name):
                yield Station(f"'{name}' called", at)
                if isinstance(defined, Place) and defined != at:
                    yield Station(f"'{name}' defined", defined)


def _sentence(event: Event) -> str:
    match event:
        case Autocast(enter=True, region=region):
            return "autocast disabled" if region is None else f"autocast entered: {region.device} {region.dtype}"
        case Autocast(enter=False):
            return "autocast left"
        case LossScaled(scaler=scaler):
            return f"loss scaled by '{scaler.name}'"
        case Backward(scale=scale):
            of = scale.value if scale is not None else None
            return f"backward, gradients scaled by '{of.name}'" if of is not None else "backward"
        case Grads(how=how, api=api):
            return f"gradients: {how} ({api})"
        case Step(optimizer=optimizer, via=via):
            return f"'{optimizer.name}' steps" + (f" through '{via.name}'" if via is not None else "")
        case Update(scaler=scaler):
            return f"'{scaler.name}' updated"
        case ZeroGrad():
            return "gradients set to zero"
        case SchedulerStep(scheduler=scheduler):
            return f"'{scheduler.name}' advances"
        case Collective(op=op, dtype=dtype):
            return f"{op} of {dtype}"
    return ""
