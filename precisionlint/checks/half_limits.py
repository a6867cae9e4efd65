"""Arithmetic in half: constants that it cannot hold, and the numbers that a training is steered by.

An epsilon below the least number, one minus an epsilon, noise that begins at zero; losses, choices of experts and totals. The patterns and
the grades are those of ``half_arithmetic``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.checks.half_arithmetic import (
    INFERENCE,
    LOGITS,
    SCALED,
    TRAINING,
    grade,
    hit,
    kept_in,
    logits,
    operand_of_square,
    short,
    trains,
    untold,
)
from precisionlint.facts import HalfLogits
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    UNKNOWN,
    VIEWS,
    WIDE,
    Computed,
    Scope,
    Shows,
    Value,
    constant,
    find,
    known_half,
    may_be_half,
    named,
    number,
    same,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-limits", None))


# -- constants that a half dtype cannot hold


@FAMILY.rule("one-minus-epsilon", Computed, ops=("log", "log1p"))
def one_minus_epsilon(state: None, event: Computed) -> Iterator[Any]:
    """``log(1 - p)`` of a p that was clamped to at most 1 - eps, where 1 - eps is 1."""
    value = event.value
    if not value.inputs or not trains(event.scope):
        return
    inner = next(iter(sources(value.inputs[0])), None)
    if inner is None:
        return
    if value.op == "log" and inner.op == "sub" and number(inner.inputs[0]) == 1.0:
        clamped = clamp_of(inner.inputs[1])
    elif value.op == "log1p" and inner.op == "neg":
        clamped = clamp_of(inner.inputs[0])
    else:
        return
    bound = upper_bound(clamped) if clamped is not None else None
    how = grade(clamped.dtypes, event.scope) if clamped is not None else None
    if clamped is None or bound is None or how is None or not 1 - 2**-9 < bound < 1.0:
        return
    if known_half(clamped.dtypes) and "bfloat16" not in clamped.dtypes and bound < 1 - 2**-12:
        return
    yield hit(
        "one-minus-epsilon",
        clamped,
        how,
        f"the bound {bound:.12g} is 1.0 in bf16{' and fp16' if bound > 1 - 2**-12 else ''}: a probability of 1 passes the clamp, and log(1 - p) "
        "is -inf; clamp in fp32",
        (TRAINING, shown_by(clamped.dtypes), *([Shows("bf16")] if bound < 1 - 2**-12 else [])),
        (Seen(clamped.at, "clamped below one"), Seen(value.at, "and one minus it goes into a log")),
    )


def clamp_of(value: Value) -> Value | None:
    """The clamp of a value; uniform noise needs none below one, which it never is, in half either."""
    clamped = next((source for source in sources(value) if source.op == "clamp"), None)
    return None if clamped is not None and any(map(from_zero, sources(clamped.inputs[0]))) else clamped


def upper_bound(value: Value) -> float | None:
    """The constant that a clamp keeps its values below."""
    return number(value.option("max", 2 if len(value.inputs) > 2 else None))


@FAMILY.rule("epsilon-underflow", Computed, ops=("div", "log", "rsqrt", "reciprocal", "sqrt", "normalize"))
def epsilon_underflow(state: None, event: Computed) -> Iterator[Any]:
    """A guard against zero that is itself zero in fp16."""
    value = event.value
    if event.scope.kind == "test":
        return
    if value.op == "div" and len(value.inputs) == 2:
        guarded, use = value.inputs[1], "divided by"
    elif value.op in ("log", "rsqrt", "reciprocal") and value.inputs:
        guarded, use = value.inputs[0], f"given to {value.op}"
    elif value.op == "sqrt" and value.inputs:
        guarded, use = value.inputs[0], "given to sqrt, whose gradient at zero is inf,"
    elif value.op == "normalize" and value.inputs:
        guarded, use = value, "divided by"
    else:
        return
    for source in sources(guarded, frozenset({"view", "either", "attribute", "sqrt"})):
        given = added_guard(source)
        by_default = given is not None and given.op == "input"
        eps = number(given.inputs[0] if given is not None and by_default and given.inputs else given)
        if eps is None or not 0 < eps < 2**-25:
            continue
        if "float16" not in source.dtypes:
            normed = source.op == "normalize" or NORMS.search(event.scope.owner)
            if grade(source.dtypes, event.scope) and (normed or trains(event.scope)):
                yield hit(
                    "epsilon-underflow",
                    source,
                    "possible",
                    vanishing(eps, use, source),
                    needs_fp16(source, bool(normed)),
                )
                return
            continue
        message = (
            f"{eps:g} is 0 in fp16 (its least number is 6e-8): the guard guards nothing, and a zero that is {use} gives inf or NaN; "
            "do this in fp32, or with an eps of 1e-4"
        )
        trace = (Seen(source.at, "the guard"), Seen(value.at, use))
        yield hit(
            "epsilon-underflow",
            source,
            "certain" if not by_default and WIDE.isdisjoint(source.dtypes) else "likely",
            message,
            (),
            trace,
        )
        return


NORMS = regex(r"norm", re.I)


def vanishing(eps: float, use: str, guarded: Value) -> str:
    """What a guard does for which nobody knows whether it is ever given fp16."""
    if guarded.op == "normalize":
        use = "divided by here"
    return (
        f"{eps:g} is 0 in fp16 (its least number is 6e-8): given fp16, a zero that is {use} makes inf or NaN; do this in fp32, or with an "
        "eps of 1e-4"
    )


def needs_fp16(guarded: Value, normed: bool) -> tuple[Shows, ...]:
    """fp16, and nothing that lifts what is guarded to fp32; norms are for any program."""
    lifted = not normed and any(atom[0] == "^" for atom in guarded.dtypes)
    return (TRAINING, Shows("fp16"), shown_by(guarded.dtypes)) if lifted else (TRAINING, Shows("fp16"))


def added_guard(value: Value) -> Value | None:
    """The eps of ``x + eps``, ``x.clamp(min=eps)`` or ``F.normalize(x, eps=eps)``."""
    if value.op == "add" and len(value.inputs) == 2:
        return value.inputs[1]
    if value.op == "clamp":
        return value.option("min", 1)
    if value.op == "normalize":
        return value.option("eps", 3) or constant(1e-12)
    return None


@FAMILY.rule("half-noise", Computed, ops=("log",))
def half_noise(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if not value.inputs:
        return
    uniform = next((s for s in sources(value.inputs[0]) if from_zero(s)), None)
    how = grade(uniform.dtypes, event.scope) if uniform is not None else None
    if uniform is None or how is None or event.scope.kind == "test":
        return
    if how != "certain" and (not trains(event.scope) or INFERENCE.search(event.scope.owner.lower())):
        return
    yield hit(
        "half-noise",
        uniform,
        how,
        f"uniform noise is drawn in {kept_in(how, uniform.dtypes)} and goes into a log: one of some hundred (bf16) to "
        "thousand (fp16) numbers is 0, and its log -inf; draw in fp32 and clamp",
        (TRAINING, shown_by(uniform.dtypes)),
        (Seen(value.at, "its log"),),
    )


def from_zero(value: Value) -> bool:
    """Whether a value is uniform noise that begins at zero."""
    if value.op == "uniform_":
        low = value.option("from", 1)
        return low is None or number(low) == 0.0
    return value.op in ("rand", "rand_like")


# -- logits and routers


LOSSES = frozenset({"cross_entropy", "criterion", "loss"})
BY_HAND = frozenset({"mean", "sum", "logsigmoid"})
LOGS = frozenset({"log", "log1p"})


@FAMILY.rule("loss-on-half-logits", Computed, HalfLogits, ops=(*BY_HAND, *LOSSES, *LOGS, "mul"))
def loss_on_half_logits(state: None, event: Computed | HalfLogits) -> Iterator[Any]:
    if isinstance(event, HalfLogits):
        yield Hit(
            "loss-on-half-logits",
            event.at,
            f"cross entropy of {event.dtype} logits, which the half model gives: the loss is off in its third digit, and so are its gradients; cast "
            "the logits to float first",
            (Seen(event.cast, f"the model becomes {event.dtype}"),),
            confidence="likely",
        )
        return
    value, scope = event.value, event.scope
    if value.op in LOGS:
        yield from log_of_the_rest(value, scope)
        return
    if value.op in BY_HAND:
        yield from loss_by_hand(value, scope)
        return
    if value.op == "mul":
        yield from focal_weight(value, scope)
    if value.op not in LOSSES or not value.inputs or not trains(scope):
        return
    given, half = value.inputs[0], known_half(value.inputs[0].dtypes)
    if scope.region is not None and scope.region.device != "cuda":  # CPU's autocast lifts it
        return
    # A loss inside CUDA's region is how every program has it; there only a cast to half is this one's.
    sure = scope.region is None or find(given, cast_to_half, lambda v: v.op in ("layer", "linear", "matmul"), 24)
    if value.op == "cross_entropy" and half and sure:
        yield hit("loss-on-half-logits", value, "certain", of_logits(given), (), logits_at(given))
        return
    # What a model gives may be anything, and so is what a criterion from elsewhere does with it.
    told = (half or may_be_half(given.dtypes - UNKNOWN)) and (
        logits(given) or (value.op == "cross_entropy" and scored(given))
    )
    free = untold(given) or may_be_half(given.dtypes)
    called = named(given, OUTPUTS) or (value.op == "cross_entropy" and named(given, LOGITS))
    if scope.enabled is not False and (told or (value.op != "loss" and free and called)):
        message = of_logits(given)
        if value.op == "loss":
            if not may_be_half(value.dtypes):  # autocast lifts it
                return
            message = of_predictions(value.name, given)
        if value.op == "criterion":
            message = f"'{value.name}' is given {short(given.dtypes)} logits: unless it widens them its loss is rounded; cast them to float first"
        needs = (TRAINING, Shows("half"))
        yield hit("loss-on-half-logits", value, "possible", message, needs, logits_at(given))


OUTPUTS = regex(r"^(?:model_)?(?:outputs?|logits?|y_?hat|preds?|predictions?)$")
"""What a program calls that which its model gives."""


def scored(given: Value) -> bool:
    """Whether what a cross entropy is given are products over a temperature: ``queries @ keys.T / 0.07``."""
    return any(source.op == "matmul" for source in sources(given, VIEWS | SCALED))


def log_of_the_rest(value: Value, scope: Scope) -> Iterator[Any]:
    """``log(1 - sigmoid(x))``, of what nothing keeps below one; what a clamp does is one-minus-epsilon's."""
    if not value.inputs or not trains(scope):
        return
    inner = next(sources(value.inputs[0], VIEWS | {"add"}))
    if value.op == "log" and inner.op == "sub" and number(inner.inputs[0]) == 1.0:
        rest = inner.inputs[1]
    elif value.op == "log1p" and inner.op == "neg":
        rest = inner.inputs[0]
    else:
        return
    soft = next((s for s in sources(rest) if s.op in ("sigmoid", "softmax") and s.inputs), None)
    how = grade(soft.dtypes, scope) if soft is not None else None
    if soft is not None and how is not None:
        yield hit(
            "loss-on-half-logits",
            value,
            "possible",
            f"the log of 1 - p is taken of a {soft.op} in {kept_in(how, soft.dtypes)}: p is 1 from logits of 6 on in bf16 (8 in fp16), and the log "
            "-inf, or that of what is added to it; take the loss of logits in fp32",
            (TRAINING, shown_by(soft.dtypes)),
            (Seen(soft.at, f"the {soft.op}"),),
        )


def loss_by_hand(value: Value, scope: Scope) -> Iterator[Any]:
    """``((prediction - target) ** 2).mean()``, ``-logsigmoid(chosen - rejected)``: losses that a program writes itself."""
    if not value.inputs or scope.enabled is False or not may_be_half(value.dtypes) or not trains(scope):
        return
    needs = (TRAINING, shown_by(value.dtypes))
    if value.op == "logsigmoid":
        parts = next((s.inputs for s in sources(value.inputs[0], VIEWS | SCALED) if s.op == "sub"), ())
        if len(parts) == 2 and all(named(each, PREFERRED) or logits(each) for each in parts):
            message = (
                "the log of a sigmoid of a difference of half scores: the difference is rounded, and so is the loss; cast the scores to float "
                "first"
            )
            yield hit("loss-on-half-logits", value, "possible", message, needs)
        return
    difference = error_within(value)
    if difference is None:
        return
    left, right = difference.inputs
    predicted = next((each for each in (left, right) if logits(each)), None)
    if predicted is not None and not of_itself(left, right) and not of_itself(right, left):
        message = of_predictions("the error", predicted)
        yield hit("loss-on-half-logits", value, "possible", message, needs, logits_at(predicted))


def focal_weight(value: Value, scope: Scope) -> Iterator[Any]:
    """``(1 - p) ** gamma * loss`` of a sigmoid or softmax: the weight of what is nearly right."""
    if len(value.inputs) != 2 or scope.enabled is False or not trains(scope):
        return
    for weight, loss in (value.inputs, value.inputs[::-1]):
        if not any(source.op in EACH for source in sources(loss, VIEWS | {"mul", "neg"})):
            continue
        power = find(weight, lambda v: v.op in ("pow", "square_pow"), lambda v: v.op in EACH, 12)
        rest = next((s for s in sources(power.inputs[0]) if s.op == "sub"), None) if power is not None else None
        if rest is None or number(rest.inputs[0]) != 1.0:
            continue
        soft = find(rest.inputs[1], lambda v: v.op in ("sigmoid", "softmax") and bool(v.inputs), limit=24)
        how = grade(soft.dtypes, scope) if soft is not None else None
        if soft is None or how is None:
            continue
        yield hit(
            "loss-on-half-logits",
            soft,
            "possible",
            f"1 - p of a {soft.op} in {kept_in(how, soft.dtypes)} weights a loss: bf16 has steps of 1/256 below 1 (fp16: 1/2048), and the weight "
            "of what is nearly right is off or 0; take it of logits in fp32",
            (TRAINING, shown_by(soft.dtypes)),
            (Seen(rest.at, "one minus it"), Seen(value.at, "weights a loss")),
        )
        return


EACH = frozenset({"bce_with_logits", "cross_entropy", "nll_loss", "bce", "log_softmax", "logsigmoid"})
"""What a loss of each element is made by."""
PREFERRED = regex(r"chosen|rejected|reward|score")
"""What two answers are called of which one is preferred."""


def error_within(value: Value) -> Value | None:
    """The difference whose squares or sizes are summed up."""
    for inner in sources(value.inputs[0]):
        operand = inner.inputs[0] if inner.op == "abs" else operand_of_square(inner)
        for made in sources(operand) if operand is not None else ():
            if made.op == "sub" and len(made.inputs) == 2:
                return made
    return None


def of_itself(left: Value, right: Value) -> bool:
    """Whether one is made of the other: a deviation from its own mean is no error."""
    return find(right, lambda v: same(v, left), lambda v: v.op in ("layer", "linear"), 24) is not None


def of_predictions(name: str, given: Value) -> str:
    return (
        f"{name} of {short(given.dtypes)} predictions: differences and their mean are rounded; cast them to float first"
    )


def of_logits(given: Value) -> str:
    return (
        f"cross entropy of {short(given.dtypes)} logits: the loss is off in its third digit, "
        "and so are its gradients; cast the logits to float first"
    )


def logits_at(given: Value) -> tuple[Seen, ...]:
    return (Seen(given.at, "the logits"),) if given.at is not None else ()


def cast_to_half(value: Value) -> bool:
    return value.op == "cast" and known_half(value.dtypes)


GATES = regex(r"gate|gating|rout|moe|expert", re.I)


GATE_PRODUCTS = frozenset({"linear", "layer", "matmul"})


@FAMILY.rule("half-router", Computed, ops=("topk",))
def half_router(state: None, event: Computed) -> Iterator[Any]:
    """Experts chosen by sigmoid scores or logits in half; a softmax in half is softmax-in-half."""
    value = event.value
    if not value.inputs or not trains(event.scope):
        return
    if not GATES.search(f"{event.scope.owner} {event.scope.function}"):
        return
    for source in sources(value.inputs[0], frozenset({"view", "either", "attribute", "add"})):
        how = grade(source.dtypes, event.scope)
        if how is None or (
            source.op not in ("sigmoid", "linear") and not (source.op == "layer" and source.name == "Linear")
        ):
            continue
        if how == "likely" and find(source, lambda v: v.op in GATE_PRODUCTS, limit=24) is None:
            how = "possible"  # the logits are handed in, and whoever takes the gate decides on their dtype
        yield hit(
            "half-router",
            value,
            how,
            f"experts are chosen by {'scores' if source.op == 'sigmoid' else 'logits'} in {kept_in(how, source.dtypes)}: near ones tie, and "
            "the choice flips from step to step; take the gate in fp32",
            (TRAINING, shown_by(source.dtypes)),
            (Seen(source.at, "the scores"), Seen(value.at, "the choice")),
        )
        return
