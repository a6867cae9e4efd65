"""Faults that follow from a step as a whole: state kept in half, updates lost, gradients summed in half, products left
in fp32.

Each is told once for each line, with what was measured there. What a chain of ops shows is found in dataflow.py, what
the step's order shows by the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from msgspec.structs import replace

from precisionlint import catalogue
from precisionlint.audit_report import OpRecord
from precisionlint.events import Backward, Event, Named
from precisionlint.events import Step as Stepped
from precisionlint.findings import Finding, Place, Severity, Step
from precisionlint.trace.averages import Averages
from precisionlint.trace.dataflow import SHORT, Dataflow
from precisionlint.trace.places import place
from precisionlint.trace.recorder import Recorder
from precisionlint.trace.registry import Registry, parameters_of
from precisionlint.trace.sums import Sums
from precisionlint.trace.underflow import Epsilon, Underflow
from precisionlint.trace.updates import Lost
from precisionlint.trace.values import NonFinite

RULES: Mapping[str, tuple[str, Severity]] = {
    "autocast-around-training-loop": ("autocast", "error"),
    "first-overflow": ("half-arithmetic", "error"),
    "fp32-matmul-under-policy": ("matmul-precision", "info"),
    "gradient-underflow": ("half-arithmetic", "warning"),
    "half-gradient-accumulation": ("master-weights", "warning"),
    "half-optimizer-state": ("master-weights", "error"),
    "half-running-sum": ("half-arithmetic", "error"),
    "half-scatter": ("half-arithmetic", "warning"),
    "loss-on-half-logits": ("half-arithmetic", "warning"),
    "lost-updates": ("master-weights", "error"),
    "norm-without-upcast": ("half-arithmetic", "warning"),
    "ranks-differ": ("data-parallel", "error"),
    "scale-collapse": ("loss-scaling", "error"),
    "softmax-in-half": ("half-arithmetic", "warning"),
}
"""The rules that are found here -> family and severity, where the catalogue has no page that says so."""
MUCH_LOST = 0.05
"""From which share on lost updates are a fault: fp32 weights lose none."""
MANY_BATCHES = 4
"""From how many backward passes on gradients that are summed in half are told."""
SMALL_PRODUCT = 0.01
"""Products below this share of the forward's operations (rotary angles, routers) may stay in fp32."""
MUCH_UNDERFLOW = 0.01
"""From which share of a gradient's sum of magnitudes on its underflow is a fault: what is small and many is nothing."""
JUDGED_AND_MEASURED = frozenset({"adam-epsilon-underflow"})
"""Rules that a check finds on the timeline, and of which the step shows what came of it."""
ENTERED = "autocast is entered"
"""How a station at which a region begins is told, by the checks as well."""
COMPENSATED = ("kahan", "comp", "master", "residual", "shift", "fp32")
"""Words in the names of optimizer state that keeps what rounding would lose."""


def finding(rule: str, message: str, at: Place, trace: Iterable[Step] = ()) -> Finding:
    """A measured finding; its severity is the page's where there is one."""
    page = catalogue.load().get(rule)
    family, severity = (page.family, page.severity) if page is not None else RULES[rule]
    return Finding(rule, family, severity, "certain", message, at, "", tuple(trace))


def of_dataflow(flow: Dataflow, recorder: Recorder, trained: bool) -> Iterator[Finding]:
    """The faults that chains of ops showed; those of training only where a backward ran."""
    for fault in flow.faults.values():
        at = fault.at or _place(recorder, fault.origin)
        if at is not None and (trained or not fault.training):
            stations = [(_place(recorder, origin), text) for origin, text in fault.trace]
            stations.insert(0, (fault.region, ENTERED))
            yield finding(fault.rule, fault.message, at, (Step(where, text) for where, text in stations if where))


def _place(recorder: Recorder, origin: int) -> Place | None:
    made = recorder.origins[origin]
    return None if made.code is None else place(made.code, made.offset)


def of_values(first: NonFinite | None, recorder: Recorder, registry: Registry, fallback: Place) -> Iterator[Finding]:
    """The first result that was not finite. In a backward under a scaler it only says that the scale will be halved:
    an info.
    """
    if first is None:
        return
    scaled = first.call.phase == "backward" and any(scaler.is_enabled() for scaler, _ in registry.scalers.values())
    module = registry.module_label(recorder.origins[first.call.origin].module)
    where = f" of {module}" if module else ""
    after = "; the scaler skips this step and halves its scale" if scaled else ""
    found = finding(
        "first-overflow",
        f"{first.op}{where} is the first op of the step whose result is not finite: {first.what} in "
        f"{dtype_text(first.dtype)}, in the {first.call.phase}, from inputs of at most {first.largest:.3g}{after}",
        _place(recorder, first.call.origin) or fallback,
    )
    yield replace(found, severity="info") if scaled else found


def dtype_text(dtype: torch.dtype) -> str:
    """``bf16``, or torch's own name without its prefix."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def of_products(ops: Iterable[OpRecord]) -> Iterator[Finding]:
    """fp32 products in a forward whose products are half for the most part.

    Products in the same call as a softmax are those of a decomposed attention, which upcasts on purpose.
    """
    ops = list(ops)
    attentions = {op.place for op in ops if op.family == "softmax"}
    products = [op for op in ops if op.family in ("matmul", "attention") and op.phase == "forward" and op.flops]
    total = sum(op.flops for op in products)
    half = [op for op in products if {"float16", "bfloat16"} & set(op.inputs)]
    if 2 * sum(op.flops for op in half) < total or not half:
        return
    recipe = SHORT[getattr(torch, max(half, key=lambda op: op.flops).inputs[-1])]
    lines: dict[Place, list[OpRecord]] = {}
    for op in products:
        if op.place is not None and op.place not in attentions and set(op.inputs) == {"float32"}:
            lines.setdefault(op.place, []).append(op)
    for at, members in lines.items():
        share = sum(op.flops for op in members) / total
        if share >= SMALL_PRODUCT:
            yield finding(
                "fp32-matmul-under-policy",
                f"{members[0].op} runs in fp32 in a {recipe} recipe: {share:.0%} of the forward's products (by "
                "operations) at a fraction of the speed",
                at,
            )


def of_gradients(ops: Iterable[OpRecord], events: Iterable[Event]) -> Iterator[Finding]:
    """Gradients of several backward passes summed in half."""
    counts: dict[str, int] = {}
    dtype = ""
    for op in ops:
        if op.parameter and op.op in ("add", "add_") and op.outputs and op.outputs[0] in ("float16", "bfloat16"):
            counts[op.parameter] = counts.get(op.parameter, 0) + op.count
            dtype = op.outputs[0]
    passes = max(counts.values(), default=0) + 1
    at = next((event.at for event in reversed(list(events)) if isinstance(event, Backward) and event.at), None)
    if passes >= MANY_BATCHES and at is not None:
        name = SHORT[getattr(torch, dtype)]
        yield finding(
            "half-gradient-accumulation",
            f"the gradients of {len(counts)} parameters are summed over {passes} backward passes in {name}: each "
            "addition rounds the sum; keep the sums in fp32",
            at,
        )


def of_state(registry: Registry, events: Iterable[Event]) -> Iterator[Finding]:
    """Moments kept in half for fp32 weights. (Those of half weights are a consequence of these.)"""
    steps = {event.optimizer.id: event.at for event in events if isinstance(event, Stepped) and event.at is not None}
    for number, (optimizer, named) in registry.optimizers.items():
        found: dict[str, tuple[torch.dtype, int]] = {}
        for parameter, state in optimizer.state.items():
            if (
                not isinstance(parameter, torch.Tensor)
                or parameter.dtype is not torch.float32
                or not isinstance(state, dict)
            ):
                continue
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype in SHORT and value.shape == parameter.shape:
                    found[str(name)] = (value.dtype, found.get(str(name), (value.dtype, 0))[1] + 1)
        at = steps.get(number)
        if found and at is not None:
            said = ", ".join(f"'{name}' in {SHORT[dtype]} ({count})" for name, (dtype, count) in found.items())
            yield finding(
                "half-optimizer-state",
                f"'{named.name}' keeps its state of fp32 weights in half: {said}; an average with decay 0.999 stands "
                "still there once its change is below half a step",
                at,
            )


def of_updates(lost: Iterable[Lost], registry: Registry, events: Iterable[Event]) -> Iterator[Finding]:
    """Half weights that stood still although the optimizer meant to move them."""
    steps = {event.optimizer.id: event.at for event in events if isinstance(event, Stepped) and event.at is not None}
    lost = list(lost)
    for number, (optimizer, named) in registry.optimizers.items():
        mine = {id(each) for each in parameters_of(optimizer)}
        members = [each for each in lost if id(each.parameter) in mine]
        meant, gone = sum(each.meant for each in members), sum(each.lost for each in members)
        beyond = sum(each.beyond for each in members)
        names = {str(name).lower() for state in optimizer.state.values() if isinstance(state, dict) for name in state}
        compensated = any(word in name for word in COMPENSATED for name in names)
        at = steps.get(number)
        if at is None or not meant or gone < MUCH_LOST * meant or beyond > 0.001 * meant or compensated:
            continue
        name = SHORT[members[0].parameter.dtype]
        whole = sum(each.lost == each.meant > 0 for each in members)
        moved = f"; {whole} of {len(members)} weights did not move at all" if whole else ""
        yield finding(
            "lost-updates",
            f"{gone / meant:.1%} of the updates of '{named.name}' round away in {name} weights{moved}: keep fp32 "
            "masters, or round stochastically",
            at,
        )


def of_averages(averages: Averages, recorder: Recorder) -> Iterator[Finding]:
    """Slow averages in half most of whose elements no longer move."""
    for origin, each in averages.found.items():
        at, meant, lost = _place(recorder, origin), int(each.meant), int(each.lost)
        if at is not None and meant and 2 * lost >= meant:
            name = SHORT[each.dtype]
            yield finding(
                "half-ema",
                f"an average with decay {1 - each.rate:g} is kept in {name}: {lost / meant:.0%} of its elements that "
                f"differ from what they follow do not move, now or later: {each.rate:g} of the difference is below "
                f"half a {name} step; keep it in fp32",
                at,
            )


def of_sums(sums: Sums, recorder: Recorder) -> Iterator[Finding]:
    """Numbers that are summed up in half from step to step."""
    for origin, dtype in sums.found.items():
        at, name = _place(recorder, origin), SHORT[dtype]
        if at is not None:
            yield finding(
                "half-running-sum",
                f"a number is summed up in {name} from step to step: the sum stands still once it is "
                f"{256 if name == 'bf16' else 2048} times as large as what is added, and rounds long before; add up in "
                "fp32",
                at,
            )


def of_underflow(underflow: Underflow, recorder: Recorder, scale: float | None) -> Iterator[Finding]:
    """Gradients a good part of which became 0 when the backward cast them to fp16."""
    for origin, cast in underflow.casts.items():
        at, (elements, magnitude) = _place(recorder, origin), cast.shares
        if at is None or not magnitude >= MUCH_UNDERFLOW:  # NaN where a gradient was inf or NaN
            continue
        factor, left = cast.best()
        yield finding(
            "gradient-underflow",
            f"{elements:.0%} of the gradient's elements that are not 0 ({magnitude:.0%} of its sum) become 0 when the "
            f"backward casts it to fp16 here, {'with no loss scale' if scale is None else f'at loss scale {scale:g}'}: "
            f"fp16 holds nothing below 3e-8; a loss scale of {factor * (scale or 1.0):g} would lose {left:.1%} of them",
            at,
        )


def of_epsilons(epsilons: Mapping[int, Epsilon], registry: Registry, events: Iterable[Event]) -> Iterator[Finding]:
    """Adam's eps that is 0 beside fp16 moments."""
    steps = {event.optimizer.id: event.at for event in events if isinstance(event, Stepped) and event.at is not None}
    for number, each in epsilons.items():
        optimizer, named = registry.optimizers[number]
        at = registry.births.place(optimizer) or steps.get(number)
        if at is not None:
            yield finding(
                "adam-epsilon-underflow",
                f"'{named.name}' adds eps={each.eps:g} in fp16, where it is 0, and "
                f"{each.zeros / each.moments:.0%} of its second moments are 0 too, so {each.broken} weights are inf or "
                "NaN after it",
                at,
            )


def of_scales(collapsed: Mapping[Place, tuple[Named, float]]) -> Iterator[Finding]:
    """Scalers whose scale has fallen below 1: the forward overflows, and scaling the loss cannot help."""
    for at, (scaler, scale) in collapsed.items():
        yield finding(
            "scale-collapse",
            f"the scale of '{scaler.name}' has fallen to {scale:g}, and this step was skipped too: below 1 it protects "
            "nothing, so what overflows is no gradient that a scale made large; `--values` names the first overflow",
            at,
        )


def _region(finding: Finding) -> Place | None:
    """Where the autocast region of a finding about one is entered; None for one of before the window."""
    entered = [step.place for step in finding.trace if step.message.endswith(ENTERED)]
    return entered[0] if entered else None


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One fault, one name: what was measured of half weights joins the finding that names them; one finding for each
    place and rule.
    """
    found = list(findings)
    around = {_region(each) for each in found if each.rule == "autocast-around-training-loop"}
    found = [each for each in found if each.rule != "backward-under-autocast" or _region(each) not in around]
    storage = [each for each in found if each.rule == "bf16-only-weights"]
    measured = [each for each in found if each.rule == "lost-updates"]
    if storage and measured:
        found = [each for each in found if each.rule not in ("bf16-only-weights", "lost-updates")]
        said = " ".join(f"Measured in this step: {each.message.partition(':')[0]}." for each in measured)
        found += [replace(each, message=f"{each.message}. {said}") for each in storage]
    unique: dict[tuple[Place, str], Finding] = {}
    for each in found:
        known = unique.setdefault((each.place, each.rule), each)
        if each.rule in JUDGED_AND_MEASURED and each.message not in known.message:
            unique[each.place, each.rule] = replace(known, message=f"{known.message}. Measured: {each.message}")
    return sorted(unique.values(), key=lambda each: (each.place, each.rule))
