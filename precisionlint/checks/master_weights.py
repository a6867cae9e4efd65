"""Where trained weights live: half weights under an optimizer that keeps no fp32 copy lose most small updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec.structs import replace

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen, frozen
from precisionlint.events import (
    Adopted,
    Backward,
    Checkpoint,
    Copied,
    Driven,
    Event,
    Iteration,
    Lost,
    Named,
    Owns,
    Setting,
    Sharded,
    Step,
    Trains,
    Weights,
    WeightsTake,
    Wrapped,
    Written,
    ZeroGrad,
    covers,
    moved,
    overlap,
)
from precisionlint.facts import HalfModel
from precisionlint.findings import Severity
from precisionlint.patterns import regex
from precisionlint.recipes import UNKNOWN, Recipe
from precisionlint.records import Record

HALF = {"float16": "fp16", "bfloat16": "bf16"}
SMALL_RATE = 1e-3
FP16_ZERO = 2.0**-25
"""The largest number that fp16 rounds to 0."""
EPS = {"Adam": 1e-8, "AdamW": 1e-8, "NAdam": 1e-8, "RAdam": 1e-8, "RMSprop": 1e-8, "Adagrad": 1e-10}
"""What optimizers of torch.optim add to the root of the second moment unless they are told otherwise."""
SOME = "…"
"""The last part of a path that means some of a model's layers."""
SIGNIFICANT = {"fp16": 11, "bf16": 8}
AT_THE_END = regex(
    r"(?!not )(?:.*(?:==|>=).*(?:- 1|\blast\w*|\bfinal\w*)\)?|.*\+ 1\)? (?:==|>=) .*|(?:\w+\.)*(?:is_)?(?:last|final)\w*)$"
)
"""A branch of the last round of a loop: ``epoch == epochs - 1``, ``final_epoch``."""


class Took(Record, frozen=True, eq=False):
    """Weights in half, and how they came to be. ``by``: the framework that cast them, if one did; ``norms``: BatchNorm layers are among
    them; ``sharded``: FSDP took them with a mixed-precision policy afterwards; ``partly``: some of their layers went back to fp32."""

    aside: ClassVar[tuple[str, ...]] = ("how", "seen", "sharding")

    weights: Weights
    dtype: str
    by: str
    how: str
    seen: Seen
    norms: bool = False
    sharded: bool = False
    sharding: Seen | None = None
    partly: bool = False

    def holds(self, weights: Weights) -> bool:
        """Whether it is seen that these weights are still half: which layers went back is not known of one parameter."""
        return not self.partly or any(path[-1] not in ("weight", "bias") for path in weights)


class Owned(Record, frozen=True, eq=False):
    """Weights under a plain optimizer. ``eps``: what it adds to the root of the second moment, where that is known."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    optimizer: Named
    weights: Weights
    cls: str
    lr: float | None
    seen: Seen
    eps: float | None = None


class Masters(Record, frozen=True, eq=False):
    """fp32 copies, kept by hand, under an optimizer, and the weights of which they are copies."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    optimizer: Named
    weights: Weights
    seen: Seen


class Storage(Record, frozen=True, eq=False):
    """Where weights live. ``wrapped``: half weights inside what something unread made of a model.

    ``copies``: models that are copies of others; ``default``: the half dtype that new tensors take, while they
    do. ``stand``: the backward whose gradients nothing has set to zero since, of a program that has half weights; ``turned``: the loop
    around it has come round with them."""

    aside: ClassVar[tuple[str, ...]] = ("default_set",)

    took: frozenset[Took] = frozenset()
    wrapped: frozenset[Took] = frozenset()
    copies: Weights = frozenset()
    frozen: Weights = frozenset()
    owned: frozenset[Owned] = frozenset()
    masters: frozenset[Masters] = frozenset()
    default: str = ""
    default_set: Seen | None = None
    stand: Seen | None = None
    turned: bool = False


HEARS = (WeightsTake, Adopted, Wrapped, Copied, Sharded, Setting, Owns, Backward, Iteration, ZeroGrad, Lost)


def advance(storage: Storage, event: Event) -> Storage:
    match event:
        case WeightsTake(trainable=None) if event.dtype in HALF and any(map(AT_THE_END.match, event.when)):
            return storage  # it trains no more
        case WeightsTake(trainable=None):
            return replace(storage, took=taken(storage.took, event))
        case WeightsTake():
            kept = frozenset(path for path in storage.frozen if not covers(event.weights, frozenset({path})))
            return replace(storage, frozen=storage.frozen | event.weights if event.trainable is False else kept)
        case Adopted():
            took = frozenset(replace(t, weights=moved(t.weights, event)) for t in storage.took)
            own = frozenset(replace(o, weights=moved(o.weights, event)) for o in storage.owned)
            return replace(storage, took=took, owned=own, frozen=moved(storage.frozen, event))
        case Wrapped() if not overlap(storage.frozen, event.weights):
            inner = {replace(t, weights=event.wrapper) for t in storage.took if overlap(t.weights, event.weights)}
            return replace(storage, wrapped=storage.wrapped | inner)
        case Copied():
            copies = {replace(took, weights=event.copy) for took in storage.took if covers(took.weights, event.weights)}
            frozen = event.copy if overlap(storage.frozen, event.weights) else frozenset()
            known = storage.copies | event.copy
            return replace(storage, took=storage.took | copies, frozen=storage.frozen | frozen, copies=known)
        case Sharded(policy=True):
            seen = Seen(event.at, "sharded with a mixed-precision policy", event.when)
            took = frozenset(
                replace(t, sharded=True, sharding=seen) if overlap(t.weights, event.weights) else t
                for t in storage.took
            )
            return replace(storage, took=took)
        case Setting(name="default_dtype"):
            dtype = event.value.value if event.value is not None else None
            if dtype not in HALF:
                return replace(storage, default="", default_set=None)
            seen = Seen(event.at, f"new tensors are {HALF[dtype]} from here on", event.when)
            return replace(storage, default=dtype, default_set=seen)
        case Owns(copies_of=weights) if weights is not None:
            here = Seen(event.at, f"{event.cls.rpartition('.')[2]} takes fp32 copies of them", event.when)
            return replace(storage, masters=storage.masters | {Masters(event.optimizer, weights, here)})
        case Owns(masters=False):
            if event.weights is None:
                return storage
            name = event.cls.rpartition(".")[2]
            seen = Seen(event.at, f"{name} takes them", event.when)
            others = frozenset(o for o in storage.owned if o.optimizer != event.optimizer)
            settings = dict(event.settings)
            plain = settings.get("fused", False) is False and event.cls.startswith("torch.optim.")
            eps = settings.get("eps", EPS.get(name)) if plain else None
            now = Owned(event.optimizer, event.weights, event.cls, event.lr, seen, eps)
            return replace(storage, owned=others | {now})
        case Backward(engine=None) if storage.took and storage.stand is None:
            return replace(storage, stand=Seen(event.at, "its gradients are not set to zero", event.when))
        case Iteration(again=True) if storage.stand is not None and not storage.turned:
            return replace(storage, turned=True)
        case ZeroGrad() | Lost() if storage.stand is not None:
            return replace(storage, stand=None, turned=False)
    return storage


def taken(all_took: frozenset[Took], event: WeightsTake) -> frozenset[Took]:
    """What is half once weights have taken a dtype."""
    if event.dtype not in HALF and all(path[-1] == SOME for path in event.weights):
        # Some layers of a model go back to fp32, its norms usually; the others stay.
        return frozenset(
            replace(t, norms=False, partly=True) if overlap(t.weights, event.weights) else t for t in all_took
        )
    took = frozenset(t for t in all_took if not covers(event.weights, t.weights))
    if event.dtype in HALF:
        assert event.dtype is not None
        seen = Seen(event.at, f"weights become {HALF[event.dtype]}: {event.how}", event.when)
        return took | {Took(event.weights, event.dtype, event.by, event.how, seen, event.norms)}
    return frozenset(t for t in took if not overlap(event.weights, t.weights))


def stakes(storage: Storage) -> int:
    """Half weights under a plain optimizer: of two optimizers between which a branch decides, one may hold fp32 copies."""
    return sum(bool(halves(storage, own.weights)) for own in storage.owned)


AUTOMATON = Automaton("master-weights", Storage(), advance, stakes=stakes, hears=HEARS)
"""The state that the rules of weights read, in all of their modules."""
FAMILY = Family(AUTOMATON)


def halves(storage: Storage, weights: Weights) -> list[Took]:
    """How these weights, or some of their parts by name, came to be in half, where none of them is known to be frozen."""
    if overlap(storage.frozen, weights):
        return []
    found = [took for took in storage.took if any(covers(took.weights, frozenset({path})) for path in weights)]
    return sorted(found, key=lambda took: (took.dtype, took.seen.text))


def inside(storage: Storage, weights: Weights) -> list[Took]:
    """What became half inside these weights, which hold other ones as well. Whether it is trained with them is likely, not seen."""
    if overlap(storage.frozen, weights):
        return []
    sure = halves(storage, weights)
    found = [took for took in storage.took if took not in sure and covers(weights, took.weights)]
    return sorted(found, key=lambda took: (took.dtype, took.seen.text))


LISTED = 3
"""So many layers are named beside the first that is made in half."""


def layers(parts: list[Took]) -> list[list[Took]]:
    """Parts of one model, together where each is a layer made in the same dtype by itself: that is one fault, told at the first by name,
    weights before biases (which some layers have not)."""
    alone = [[took] for took in parts if took.by or took.sharded or took.partly]
    for dtype in HALF:
        group = [took for took in parts if took.dtype == dtype and [took] not in alone]
        if group:
            alone.append(
                sorted(group, key=lambda took: sorted((path[-1] == "bias", str(path[1:])) for path in took.weights))
            )
    return alone


def severity_at(lr: float | None) -> Severity:
    """At large learning rates most updates survive."""
    return "warning" if lr is not None and lr >= SMALL_RATE else "error"


@FAMILY.rule("bf16-only-weights", Step, Driven, Trains, Recipe, Owns, WeightsTake, HalfModel)
def bf16_only_weights(
    storage: Storage, event: Step | Driven | Trains | Recipe | Owns | WeightsTake | HalfModel
) -> Iterator[Any]:
    if isinstance(event, HalfModel):
        yield _written_half(event)
        return
    if isinstance(event, Recipe):
        yield from _half_weights_configured(event)
        return
    if isinstance(event, Owns | WeightsTake):
        yield from _loaded_and_handed(event)
        return
    if isinstance(event, Trains):
        if not event.precision:
            for took in halves(storage, event.weights):
                here = Seen(event.at, f"'{event.trainer.name}' trains them with {event.optimizer}", event.when)
                yield lost_updates(took, event.weights, event.optimizer, event.lr, (took.seen, here))
        return
    for own in storage.owned:
        if own.optimizer != event.optimizer or own.lr == 0:  # at a rate of 0 nothing is updated that could be lost
            continue
        sure = halves(storage, own.weights)
        loose = [took for took in storage.wrapped if took.weights == own.weights and not took.by and not took.sharded]
        for took in loose if not sure else ():
            seen = (took.seen, own.seen, Seen(event.at, stepped(event), event.when))
            hit = lost_updates(took, own.weights, own.cls.rpartition(".")[2], own.lr, seen)
            yield replace(hit, confidence="possible")
        for took, *more in (*([took] for took in sure), *layers(inside(storage, own.weights))):
            if not took.by and not took.sharded:
                known = isinstance(event, Step)
                beside = [one.seen for one in more[:LISTED]]
                trace = (took.seen, *beside, own.seen, Seen(event.at, stepped(event), event.when))
                hit = lost_updates(took, own.weights, own.cls.rpartition(".")[2], own.lr, trace)
                if not took.holds(own.weights):
                    yield replace(hit, confidence="possible")
                else:
                    yield hit if took in sure and known else replace(hit, confidence="likely")


def lost_updates(took: Took, weights: Weights, optimizer: str, lr: float | None, trace: tuple[Seen, ...]) -> Hit:
    name = HALF[took.dtype]
    rate = f" at lr {lr:g}" if lr is not None else ""
    return Hit(
        "bf16-only-weights",
        took.seen.at,
        f"{optimizer} steps {name} weights with no fp32 copy{rate}: an update smaller than half a {name} step rounds to nothing, "
        f"and {share_lost(lr, took.dtype)}; keep the weights in fp32 and use autocast",
        trace,
        unless=frozen(weights),
        severity=severity_at(lr),
    )


def share_lost(lr: float | None, dtype: str) -> str:
    """How many updates of about the learning rate half weights near 0.02 lose, in words: in bf16 none at 1e-3, an eighth at 1e-4 and
    nearly all at 1e-5, where each weight moves by the rate, as with AdamW. fp16 has three bits more."""
    if lr is None:
        return "most do at fine-tuning rates" if dtype == "bfloat16" else "many do at fine-tuning rates"
    rate = lr if dtype == "bfloat16" else lr * 8
    if rate <= 2e-5:
        return "most do at this rate"
    return "some do at this rate, more as it falls" if rate < 2.5e-4 else "more do as the rate falls"


def stepped(event: Step | Driven) -> str:
    return "stepped here" if isinstance(event, Step) else "handed to what trains, by its name"


@FAMILY.rule("half-before-shard", Step, Driven)
def half_before_shard(storage: Storage, event: Step | Driven) -> Iterator[Hit]:
    for own in storage.owned:
        if own.optimizer != event.optimizer:
            continue
        for took in halves(storage, own.weights):
            if took.sharded and took.sharding is not None:
                name = HALF[took.dtype]
                yield Hit(
                    "half-before-shard",
                    took.seen.at,
                    f"the weights are {name} before FSDP shards them: its mixed-precision policy casts fp32 shards for the computation, and here "
                    f"the shards themselves are {name}, so {own.cls.rpartition('.')[2]} has no fp32 copy to step; shard fp32 weights",
                    (took.seen, took.sharding, own.seen, Seen(event.at, stepped(event), event.when)),
                    unless=frozen(own.weights),
                    confidence="certain" if isinstance(event, Step) else "likely",
                )


@FAMILY.rule("half-batchnorm", Step)
def half_batchnorm(storage: Storage, event: Step) -> Iterator[Hit]:
    for own in storage.owned:
        for took in halves(storage, own.weights) if own.optimizer == event.optimizer else ():
            if took.norms:
                name = HALF[took.dtype]
                consequence = {
                    "bf16": "a batch that differs from them by less than a few percent no longer moves them",
                    "fp16": "they are good to half a percent, and a variance above 65504 is inf",
                }[name]
                yield Hit(
                    "half-batchnorm",
                    took.seen.at,
                    f"{took.how} also casts the running statistics of BatchNorm to {name}: {consequence}; keep BatchNorm layers in fp32",
                    (took.seen, own.seen, Seen(event.at, "trained here", event.when)),
                    unless=frozen(own.weights),
                )


@FAMILY.rule("adam-epsilon-underflow", Step)
def adam_epsilon_underflow(storage: Storage, event: Step) -> Iterator[Hit]:
    for own in storage.owned:
        if own.optimizer != event.optimizer or own.eps is None or own.eps > FP16_ZERO:
            continue
        for took in halves(storage, own.weights):
            if took.dtype == "float16":
                name = own.cls.rpartition(".")[2]
                yield Hit(
                    "adam-epsilon-underflow",
                    own.seen.at,
                    f"{name} adds eps={own.eps:g} in fp16, where it is 0: a weight whose second moment has underflowed (any gradient below 5e-3) is "
                    "divided by zero and becomes inf or NaN in one step; fused=True computes in fp32, fp32 weights avoid it",
                    (took.seen, own.seen, Seen(event.at, "stepped here", event.when)),
                    unless=frozen(own.weights),
                )


@FAMILY.rule("half-default-dtype", Step)
def half_default_dtype(storage: Storage, event: Step) -> Iterator[Hit]:
    if storage.default and storage.default_set is not None:
        name = HALF[storage.default]
        yield Hit(
            "half-default-dtype",
            storage.default_set.at,
            f"the default dtype is still {name} while the program trains: counters, sums, tables and buffers made from here on are {name} too, "
            "not only the model; set it back once the model is made, or give the model its dtype",
            (storage.default_set, Seen(event.at, "trained under it", event.when)),
        )


@FAMILY.rule("masters-not-copied-back", Step, Written)
def masters_not_copied_back(storage: Storage, event: Step | Written) -> Iterator[Any]:
    if isinstance(event, Written):
        for path in event.weights or ():
            yield Evidence(("written", path[0]))
        return
    for masters in storage.masters:
        if masters.optimizer != event.optimizer:
            continue
        for took in halves(storage, masters.weights):
            name = HALF[took.dtype]
            yield Hit(
                "masters-not-copied-back",
                event.at,
                f"'{event.optimizer.name}' steps fp32 copies, and nothing in the program copies them back into the {name} weights that the "
                "forward uses: the model never changes; copy each master into its weight after the step",
                (took.seen, masters.seen, Seen(event.at, "the copies are stepped", event.when)),
                unless=tuple(sorted({("written", path[0]) for path in masters.weights}, key=str)),
            )


@FAMILY.rule("masters-lost-in-checkpoint", Checkpoint)
def masters_lost_in_checkpoint(storage: Storage, event: Checkpoint) -> Iterator[Hit]:
    if not event.write or not event.optimizers:
        return
    saved = Seen(event.at, "saved here", event.when)
    stepped = tuple(own.seen for own in storage.owned if own.optimizer in event.optimizers)
    halved: list[tuple[str, Any, tuple[Seen, ...]]] = []
    if event.half:
        halved = [(event.half, event.at, (*stepped, replace(saved, text=f"saved here in {HALF[event.half]}")))]
    for took in storage.took:
        if covers(storage.copies, took.weights) and overlap(event.weights, took.weights):
            halved.append((took.dtype, took.seen.at, (took.seen, saved)))
    held = " and ".join(sorted({f"'{optimizer.name}'" for optimizer in event.optimizers}))
    for dtype, at, trace in halved:
        yield Hit(
            "masters-lost-in-checkpoint",
            at,
            f"a checkpoint holds {held} to go on with, but these weights in {HALF[dtype]}: a resumed run starts from rounded "
            "weights, and what had been added below the rounding is lost; keep a half copy for export apart from the checkpoint",
            trace,
            once=event.optimizers[0],
        )


def _written_half(model: HalfModel) -> Hit:
    """What the file says, whichever way leads there."""
    return Hit(
        "bf16-only-weights",
        model.at,
        f"'{model.name}' is {model.dtype} from here on, and {model.optimizer} takes its parameters: unless something else keeps fp32 copies of "
        f"them, an update smaller than half a {model.dtype} step rounds to nothing; keep the weights in fp32 and use autocast",
        (Seen(model.taken, f"{model.optimizer} takes its parameters"),),
        confidence="possible",
    )


HANDED = "an optimizer takes a model that its function is handed"


def _loaded_and_handed(event: Owns | WeightsTake) -> Iterator[Any]:
    """One function loads a model in half, another trains the one that it is handed: whoever calls both decides."""
    if isinstance(event, Owns):
        if event.handed and event.masters is False and event.lr != 0:
            yield Evidence(HANDED)
    elif event.dtype in HALF and event.how.startswith("from_pretrained") and not event.by:
        name = HALF[event.dtype]
        yield Hit(
            "bf16-only-weights",
            event.at,
            f"a model is loaded in {name} here, and another function trains the one that it is handed with a plain optimizer: if that is this one, "
            f"an update smaller than half a {name} step rounds to nothing; load it in fp32 for training",
            (Seen(event.at, f"weights become {name}: {event.how}", event.when),),
            confidence="possible",
            unless=frozen(event.weights),
            needs=(HANDED,),
        )


def _half_weights_configured(recipe: Recipe) -> Iterator[Hit]:
    """A configuration that leaves trained weights without an fp32 copy."""
    weights, rate = recipe.weights, recipe.rate.number if recipe.rate is not None else None
    if weights is None or recipe.framework == "Lightning":
        return
    by = (
        f" steps {weights.half} weights"
        if recipe.optimizer is not None
        else f"{recipe.framework} steps {weights.half} weights"
    )
    if recipe.optimizer is not None:
        by = str(recipe.optimizer.value).rpartition(".")[2] + by
    at = f" at lr {rate:g}" if rate is not None else ""
    stations = ((recipe.optimizer, "stepped by"), (recipe.rate, "learning rate"))
    yield Hit(
        "bf16-only-weights",
        weights.at,
        f"{by} with no fp32 copy{at}: an update smaller than half a {weights.half} step rounds to nothing, and most do at fine-tuning "
        f"rates; {recipe.remedy}",
        tuple(
            Seen(each.at, f"{what}: {each.value}")
            for each, what in stations
            if each is not None and each.value is not UNKNOWN
        ),
        severity=severity_at(rate),
        confidence="certain" if recipe.sure else "likely",
    )
