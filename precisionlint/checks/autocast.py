"""Autocast regions: what runs inside one that should not, and the half copies of weights that one keeps.

Autocast casts an fp32 weight that needs a gradient when it is first used, and keeps the copy until the outermost region is left.
Whatever changes the weight meanwhile is not seen by a forward inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from precisionlint.checks.base import Automaton, Change, Evidence, Family, Hit, Remedy, Seen, frozen
from precisionlint.events import (
    Autocast,
    Backward,
    Event,
    Named,
    Op,
    Owns,
    Region,
    Step,
    Weights,
    WeightsTake,
    Written,
    covers,
    overlap,
)
from precisionlint.facts import EnclosedBackward, UnenteredRegion
from precisionlint.findings import Confidence
from precisionlint.patterns import regex
from precisionlint.records import Record
from precisionlint.valueflow import Called, Computed, Shows, Touched, Value, known_half, sources

HALF = ("float16", "bfloat16")


class Changed(Record, frozen=True, eq=False):
    """Weights that were changed after the region had cast them: by an optimizer's step, or written over. ``how``: ``"step"`` or the name
    of what wrote them."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    weights: Weights
    how: str
    seen: Seen


class Open(Struct, frozen=True):
    """The regions that are open on a path. ``used``: weights of which a copy is kept; ``own``: whose weights each optimizer steps; ``bare``:
    weights of which no copy is kept, being half themselves or frozen."""

    depth: int = 0
    outer: Region | None = None
    used: Weights = frozenset()
    changed: frozenset[Changed] = frozenset()
    own: frozenset[tuple[Named, Weights]] = frozenset()
    bare: Weights = frozenset()


HEARS = (Autocast, Op, Step, Written, Owns, WeightsTake)


def advance(state: Open, event: Event) -> Open:
    match event:
        case Autocast(enter=True):
            outer = state.outer if state.depth else event.region
            return replace(state, depth=state.depth + 1, outer=outer)
        case Autocast():
            if state.depth > 1:
                return replace(state, depth=state.depth - 1)
            return replace(state, depth=0, outer=None, used=frozenset(), changed=frozenset())
        case Op(family="module") if state.depth and event.dtypes[0] in HALF:
            path = event.inputs[0]
            assert isinstance(path, tuple)
            weights: Weights = frozenset({path})
            return state if covers(state.bare, weights) else replace(state, used=state.used | weights)
        case Step() | Written(how="average" | "copy") if state.used:
            changed = changed_by(state, event)
            return state if changed is None else replace(state, changed=state.changed | {changed})
        case Owns() if event.weights is not None:
            others = frozenset((o, w) for o, w in state.own if o != event.optimizer)
            return replace(state, own=others | {(event.optimizer, event.weights)})
        case WeightsTake() if event.trainable is False or event.dtype in HALF:
            return replace(state, bare=state.bare | event.weights)
        case WeightsTake():
            kept = frozenset(path for path in state.bare if not covers(event.weights, frozenset({path})))
            return replace(state, bare=kept)
    return state


def changed_by(state: Open, event: Step | Written) -> Changed | None:
    """The weights that an event changes although the region keeps copies of them."""
    if isinstance(event, Written):
        weights, how, text = event.weights, event.api, f"{event.api} changes weights that the region has cast"
    else:
        weights = next((w for o, w in state.own if o == event.optimizer), None)
        how, text = "step", f"'{event.optimizer.name}' changes weights that the region has cast"
    if weights is None or not overlap(state.used, weights):
        return None
    return Changed(weights, how, Seen(event.at, text, event.when))


def settle(state: Open) -> Open:
    return Open(own=state.own, bare=state.bare)


FAMILY = Family(Automaton("autocast", Open(), advance, settle, lambda state: len(state.changed), HEARS))


@FAMILY.rule("backward-under-autocast", Backward, EnclosedBackward)
def backward_under_autocast(state: Open, event: Backward | EnclosedBackward) -> Iterator[Any]:
    if isinstance(event, EnclosedBackward):
        yield Hit(
            "backward-under-autocast",
            event.at,
            f"backward is written into the block of {event.region}: its ops already run in their forward's dtypes, and what it runs anew "
            "(recomputation, hooks, double backward) is cast once more; leave the region first",
            (Seen(event.entered, "the region"),),
            confidence="possible",
        )
        return
    region = event.open_region
    if region is None or region.opener or region.dtype not in (*HALF, ""):
        return
    yield Hit(
        "backward-under-autocast",
        event.at,
        "backward runs inside the autocast region: its ops already run in their forward's dtypes, and what it runs anew (recomputation, "
        "hooks, double backward) is cast once more; leave the region first",
        (
            Seen(region.at, f"{region.dtype or region.setting} autocast is entered".lstrip()),
            Seen(event.at, "backward, still inside", event.when),
        ),
        confidence="certain" if region.dtype else "possible",
        unless=(("spans steps", region.at),),
    )


@FAMILY.rule("autocast-not-entered", UnenteredRegion)
def autocast_not_entered(state: Open, event: UnenteredRegion) -> Iterator[Hit]:
    runs = "what was to run in fp32 runs in half" if event.off else "what was to run in half runs in fp32"
    if not event.joined:
        yield Hit(
            "autocast-not-entered",
            event.at,
            f"{event.region} makes a region and does not enter it: {runs}; write a with before it",
            (),
        )
        return
    end = "last" if event.joined == "and" else "first"
    assert event.entered is not None
    yield Hit(
        "autocast-not-entered",
        event.at,
        f"this with enters {event.kept} and not {event.region}: '{event.joined}' of two context managers gives the {end} one, so that {runs}; "
        "write a comma between them",
        (Seen(event.at, "a region is made"), Seen(event.entered, f"what '{event.joined}' gives, and the with enters")),
    )


def stale(state: Open, event: Op) -> list[Changed]:
    """What has changed the weights that a forward in the region uses a copy of."""
    path = event.inputs[0] if event.family == "module" else None
    if not isinstance(path, tuple) or event.dtypes[0] not in HALF or covers(state.bare, frozenset({path})):
        return []
    mine: Weights = frozenset({path})
    found = [c for c in state.changed if overlap(c.weights, mine) and overlap(state.used, mine)]
    return sorted(found, key=lambda c: c.seen.text)


@FAMILY.rule("autocast-around-training-loop", Op)
def autocast_around_training_loop(state: Open, event: Op) -> Iterator[Any]:
    steps = [changed for changed in stale(state, event) if changed.how == "step"]
    region = state.outer
    if not steps or (region is not None and not region.cache):
        return
    if region is not None:
        yield Evidence(("spans steps", region.at))
    entered = (
        (Seen(region.at, f"{region.dtype or 'half'} autocast is entered", region.when),) if region is not None else ()
    )
    for step in steps:
        yield Hit(
            "autocast-around-training-loop",
            event.at,
            "this forward uses half copies of weights that an optimizer has changed since: the autocast region spans the step, and its cache "
            "hands out the old weights, so the model stops learning; enter the region anew for each forward",
            (*entered, step.seen, Seen(event.at, "the old copies are used again", event.when)),
            unless=frozen(step.weights),
        )


@FAMILY.rule("weights-changed-under-autocast", Op)
def weights_changed_under_autocast(state: Open, event: Op) -> Iterator[Any]:
    region = state.outer
    if region is not None and not region.cache:
        return
    for changed in stale(state, event):
        if changed.how != "step":
            yield Hit(
                "weights-changed-under-autocast",
                changed.seen.at,
                f"{changed.how} changes weights inside the autocast region that has cast them: until the region is left, its cache hands "
                "out the half copies of the old ones; change them outside the region, or enter it anew",
                (changed.seen, Seen(event.at, "the old copies are used again", event.when)),
                unless=frozen(changed.weights),
            )


MADE = regex(r"torch\.(?:cuda\.|cpu\.)?(?:amp\.)?(?:autocast|autocast_mode\.autocast)$")
NO_FLOAT32 = frozenset({"cpu", "xpu", "mps", "hpu"})
"""Devices whose autocast takes half dtypes only. CUDA's checks nothing."""
DEPRECATED = {
    "torch.cuda.amp.autocast": 'torch.amp.autocast("cuda", …)',
    "torch.cpu.amp.autocast": 'torch.amp.autocast("cpu", …)',
    "torch.cuda.amp.GradScaler": 'torch.amp.GradScaler("cuda", …)',
    "torch.cpu.amp.GradScaler": 'torch.amp.GradScaler("cpu", …)',
    "transformer_engine.pytorch.fp8_autocast": "transformer_engine.pytorch.autocast(…)",
    "torch.cuda.amp.custom_fwd": 'torch.amp.custom_fwd(device_type="cuda")',
    "torch.cuda.amp.custom_bwd": 'torch.amp.custom_bwd(device_type="cuda")',
}


KNOWN_SINCE = {
    "torch.cuda.amp.GradScaler": "2.3",
    "torch.cpu.amp.GradScaler": "2.3",
    "torch.cuda.amp.custom_fwd": "2.4",
    "torch.cuda.amp.custom_bwd": "2.4",
}
"""The version of torch that first has the new name; autocast has had it since 1.10."""


@FAMILY.rule("autocast-float32-dtype", Called)
def autocast_float32_dtype(state: None, event: Called) -> Iterator[Any]:
    made = event.value
    if not MADE.match(made.name):
        return
    dtype = made.option("dtype", 1)
    dtypes = [each.name for each in sources(dtype, frozenset({"either"}))] if dtype is not None else []
    if not any(name in ("torch.float32", "torch.float") for name in dtypes):
        return
    device = made.option("device_type", 0)
    known = made.name == "torch.cpu.amp.autocast" or (device is not None and device.constant in NO_FLOAT32)
    cuda = made.name == "torch.cuda.amp.autocast" or (device is not None and device.constant == "cuda")
    enabled = made.option("enabled", 0 if made.name == "torch.cuda.amp.autocast" else 2)
    if len(dtypes) > 1 and (known or cuda or enabled is not None or device is None or device.name != "type"):
        return  # one of several: what the choice is for, a program knows that knows its device
    if not known and made.ref == "decorator" and cuda:
        yield Hit(
            "autocast-float32-dtype",
            event.at,
            "autocast for CUDA with dtype=torch.float32 as a decorator is made at import: on a machine without CUDA it warns there and is off, "
            "and on any other device half inputs stay half; write enabled=False and cast them",
            (),
            confidence="possible" if made.name == "torch.cuda.amp.autocast" else "certain",
        )
    if cuda and event.placed.startswith("'") and made.ref != "decorator":
        yield Hit(
            "autocast-float32-dtype",
            event.at,
            f"autocast for CUDA with dtype=torch.float32, where tensors are on {event.placed}: on any other device the region does nothing, and "
            "half inputs stay half; write enabled=False for that device's type and cast them",
            (),
            confidence="possible",
        )
    if not known and not cuda and device is not None and (enabled is None or enabled.constant is not False):
        yield Hit(
            "autocast-float32-dtype",
            event.at,
            "autocast has float32 on CUDA alone, and this device is any that the tensors are on: on others the region warns each time and "
            "disables itself, and half inputs stay half; write enabled=False and cast them",
            (),
            confidence="possible",
        )
    if not known:
        return  # CUDA's autocast takes float32: it lifts half inputs of products
    yield Hit(
        "autocast-float32-dtype",
        event.at,
        "autocast has no float32 on this device: it warns each time and disables itself, and half inputs stay half; write enabled=False and "
        "cast them",
        (),
        fix=Remedy(
            (Change("argument", event.at, "dtype@!>enabled", "False"),),
            "half inputs stay half, as before, and no warning says so any more",
        ),
    )


@FAMILY.rule("autocast-device-mismatch", Called)
def autocast_device_mismatch(state: None, event: Called) -> Iterator[Any]:
    made = event.value
    if event.placed:
        yield for_cuda_alone(event)
        return
    if made.name not in ("torch.autocast", "torch.amp.autocast"):
        return
    device = made.option("device_type", 0)
    if device is None:
        if "" not in made.options:
            yield Hit(
                "autocast-device-mismatch",
                event.at,
                f'{made.name} has no device_type: it raises TypeError where it is reached; name the device ("cuda")',
                (),
            )
        return
    as_text = device.op == "view" and device.name == "str"
    for source in sources(device, frozenset({"view", "either"})):  # no further: "cuda:0".split(":")[0] is the type
        owner = device_of(source)
        if owner:
            yield whole(event, source, f"that of {owner}")
            return
        if source.op == "input" and (source.ref == "torch.device" or (as_text and source.name == "device")):
            if as_text:
                yield whole(event, source, "as text", "likely", (Shows("a device with its index"),))
                return
            yield not_text(event, source)
            return
        if source.op == "constructed" and source.name == "torch.device":
            if not as_text:
                yield not_text(event, source)
                return
            if len(source.inputs) > 1 or any(with_colon(part) for part in source.inputs):
                yield whole(event, source, "as text")
                return
        if with_colon(source):
            yield with_index(event, source, repr(source.constant if source.op == "constant" else source.name + "…"))
            return
    if event.place and all(is_a_place(source) for source in sources(device, frozenset({"view", "either"}))):
        yield whole(event, device, "the one that tensors are put on", "possible")


def with_colon(value: Value) -> bool:
    """Whether a value is the text of a device with its index."""
    if value.op == "constant":
        return isinstance(value.constant, str) and ":" in value.constant
    return value.op == "text" and re.match(r"(?:cuda|xpu|npu|hip):", value.name) is not None


OWNERS = regex(
    r"(?:self\.)?(?:\w*model|module|net|x\w?|inputs?|images?|imgs?|tensors?|\w*_states|logits|query|latents?|samples?|feat\w*)$"
)
PRETRAINED = regex(r"\.Auto(?:Model\w*)\.from_|Model\.from_pretrained$|For\w+\.from_pretrained$")
"""What has a device that is a torch.device: models and tensors, not the settings of a run."""


PLACE = regex(r"(?:^|[._])device$")


def is_a_place(value: Value) -> bool:
    """Whether a value is a device by its name: a parameter, a setting, or what a function of another file finds."""
    return value.op in ("input", "size", "unknown", "constructed") and PLACE.search(value.name) is not None


def device_of(value: Value) -> str:
    """Whose device a value is, in words: a tensor's, or a model's; empty where it is none, or that of something else."""
    if value.name != "device":
        return ""
    if value.op == "size" and value.inputs and OWNERS.match(value.inputs[0].name):
        return f"'{value.inputs[0].name}'"
    if value.op == "unknown" and isinstance(value.ref, tuple) and value.ref[0] == "attribute":
        owner = value.ref[1]
        if isinstance(owner, Value) and owner.op == "constructed" and PRETRAINED.search(owner.name):
            return "a pretrained model"
    return ""


def for_cuda_alone(event: Called) -> Hit:
    off = event.value.option("enabled", 2 if event.value.name.count(".") < 3 else 0)
    does = "switches nothing off" if off is not None and off.constant is False else "does nothing"
    return Hit(
        "autocast-device-mismatch",
        event.at,
        f"autocast is for CUDA, written out, where tensors are on {event.placed}: on any other device the region {does}; pass the type of "
        "that device (x.device.type)",
        (),
        confidence="possible",
    )


def not_text(event: Called, device: Value) -> Hit:
    return Hit(
        "autocast-device-mismatch",
        event.at,
        "device_type is a torch.device here: autocast takes a string and raises ValueError; pass the device's .type",
        (Seen(device.at, "the device"),) if device.at is not None else (),
    )


def whole(
    event: Called, device: Value, which: str, confidence: Confidence = "certain", needs: tuple[Shows, ...] = ()
) -> Hit:
    return Hit(
        "autocast-device-mismatch",
        event.at,
        f"device_type is a whole device, {which}, with its index if it has one: autocast takes a type; a torch.device raises ValueError, and "
        "for 'cuda:0' older versions of torch raise RuntimeError; pass the device's .type",
        (Seen(device.at, "the device"),) if device.at is not None else (),
        confidence=confidence,
        needs=needs,
    )


def with_index(event: Called, device: Value, text: str) -> Hit:
    return Hit(
        "autocast-device-mismatch",
        event.at,
        f"device_type is a whole device, {text}: autocast takes a type; older versions of torch raise RuntimeError, 2.13 takes it but "
        "skips the checks that it has for 'cuda'; pass torch.device(…).type",
        (Seen(device.at, "the device"),) if device.at is not None else (),
    )


LOSSES = regex(r"loss|bce|criterion|objective|assign|(?:training|train|validation|common|shared)_step", re.I)
"""A function that others call for the loss, in the region that they have entered."""


ASSIGNED = regex(r"assign|match|cost|loss", re.I)
"""Where a loss pairs what is predicted with targets, without gradients."""


@FAMILY.rule("bce-under-autocast", Computed, ops=("bce",))
def bce_under_autocast(state: None, event: Computed) -> Iterator[Any]:
    value, scope = event.value, event.scope
    if not value.inputs or scope.enabled is False or scope.kind == "test":
        return
    # Without gradients it raises all the same, but what is evaluated may leave the region.
    if not scope.grad and not ASSIGNED.search(scope.function):
        return
    certain = scope.enabled is True and scope.region is not None and scope.region.device == "cuda"
    switched = scope.switched is not None and scope.switched.device == "cuda"
    reached = scope.enabled is not True and (scope.kind == "module" or LOSSES.search(f"{scope.owner} {scope.function}"))
    if not (certain or switched or reached):
        return
    hit = Hit(
        "bce-under-autocast",
        value.at,
        "binary_cross_entropy on probabilities raises under CUDA autocast ('unsafe to autocast'): use binary_cross_entropy_with_logits, or "
        "leave autocast around it and cast to float",
        (),
    )
    if certain:
        yield hit
    elif switched:
        yield replace(hit, confidence="likely")
    elif scope.kind != "module":
        yield replace(hit, confidence="possible", needs=(Shows("half"),))
    else:
        needs = (Shows("training"), Shows("loss under autocast"))
        yield from (replace(hit, confidence="likely", needs=needs), replace(hit, confidence="possible"))


@FAMILY.rule("deprecated-amp-api", Touched)
def deprecated_amp_api(state: None, event: Touched) -> Iterator[Any]:
    new = DEPRECATED.get(event.name)
    if new is not None and not event.scope.guarded:
        since = " since torch 2.4" if event.name.startswith("torch.") else ""
        yield Hit(
            "deprecated-amp-api",
            event.at,
            f"{event.name} is deprecated{since} and warns: {new}",
            (),
            fix=Remedy((Change("rename", event.at, new.partition("(")[0]),), torch=KNOWN_SINCE.get(event.name, "")),
            torch=">=2.4" if since else "",
        )


SENSITIVE = frozenset({"exp", "log", "log1p", "pow", "square_pow", "norm", "cumsum", "loss"})
"""Families that autocast is left for. (torch's own softmax adds up in fp32 whatever it is given; a log-softmax or a cross entropy in half goes
by rules of its own.)"""


@FAMILY.rule("autocast-off-without-cast", Computed, ops=SENSITIVE)
def autocast_off_without_cast(state: None, event: Computed) -> Iterator[Any]:
    value, scope = event.value, event.scope
    if scope.enabled is not False or not value.inputs or not scope.grad:
        return
    given = value.inputs[0]
    if not known_half(given.dtypes) or not known_half(value.dtypes) or scope.kind == "test":
        return
    dtype = "bf16" if "bfloat16" in given.dtypes else "fp16"
    yield Hit(
        "autocast-off-without-cast",
        value.at,
        f"autocast is disabled around this {value.op.replace('_pow', '')}, but what it is given is {dtype} already, and nothing lifts it now; "
        "cast it with .float()",
        (Seen(given.at, f"made in {dtype}"),) if given.at is not None else (),
    )
