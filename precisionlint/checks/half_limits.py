"""Arithmetic in half: constants that it cannot hold, and the numbers that a training is steered by.

An epsilon below the least number, one minus an epsilon, noise that begins at zero; losses, choices of experts and totals. The patterns and
the grades are those of ``half_arithmetic``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Seen
from precisionlint.checks.half_arithmetic import (
    INFERENCE,
    TRAINING,
    grade,
    hit,
    kept_in,
    logits,
    short,
    trains,
)
from precisionlint.valueflow import (
    NUMBER,
    RANK,
    VIEWS,
    Computed,
    Scope,
    Shows,
    Value,
    constant,
    find,
    known_half,
    may_be_half,
    number,
    same,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-limits", None))


# -- constants that a half dtype cannot hold


@FAMILY.rule("one-minus-epsilon", Computed)
def one_minus_epsilon(state: None, event: Computed) -> Iterator[Any]:
    """``log(1 - p)`` of a p that was clamped to at most 1 - eps, where 1 - eps is 1."""
    value = event.value
    if value.op not in ("log", "log1p") or not value.inputs or not trains(event.scope):
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
    return next((source for source in sources(value) if source.op == "clamp"), None)


def upper_bound(value: Value) -> float | None:
    """The constant that a clamp keeps its values below."""
    return number(value.option("max", 2 if len(value.inputs) > 2 else None))


@FAMILY.rule("epsilon-underflow", Computed)
def epsilon_underflow(state: None, event: Computed) -> Iterator[Any]:
    """A guard against zero that is itself zero in fp16."""
    value = event.value
    if event.scope.kind == "test":
        return
    if value.op == "div" and len(value.inputs) == 2:
        guarded, use = value.inputs[1], "divided by"
    elif value.op in ("log", "rsqrt", "reciprocal") and value.inputs:
        guarded, use = value.inputs[0], f"given to {value.op}"
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
            if (source.op == "normalize" or NORMS.search(event.scope.owner)) and grade(source.dtypes, event.scope):
                yield hit(
                    "epsilon-underflow",
                    source,
                    "possible",
                    f"{eps:g} is 0 in fp16 (its least number is 6e-8): given fp16, a vector of zeros is divided by zero here and becomes NaN; "
                    "do this in fp32, or with an eps of 1e-4",
                    (TRAINING, Shows("fp16")),
                )
                return
            continue
        message = (
            f"{eps:g} is 0 in fp16 (its least number is 6e-8): the guard guards nothing, and a zero that is {use} gives inf or NaN; "
            "do this in fp32, or with an eps of 1e-4"
        )
        trace = (Seen(source.at, "the guard"), Seen(value.at, use))
        yield hit("epsilon-underflow", source, "likely" if by_default else "certain", message, (), trace)
        return


NORMS = re.compile(r"norm", re.I)


def added_guard(value: Value) -> Value | None:
    """The eps of ``x + eps``, ``x.clamp(min=eps)`` or ``F.normalize(x, eps=eps)``."""
    if value.op == "add" and len(value.inputs) == 2:
        return value.inputs[1]
    if value.op == "clamp":
        return value.option("min", 1)
    if value.op == "normalize":
        return value.option("eps", 3) or constant(1e-12)
    return None


@FAMILY.rule("half-noise", Computed)
def half_noise(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if value.op != "log" or not value.inputs:
        return
    uniform = next((s for s in sources(value.inputs[0]) if from_zero(s)), None)
    how = grade(uniform.dtypes, event.scope) if uniform is not None else None
    if uniform is None or how is None or event.scope.kind == "test":
        return
    if how == "likely" and (not trains(event.scope) or INFERENCE.search(event.scope.owner.lower())):
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


@FAMILY.rule("loss-on-half-logits", Computed)
def loss_on_half_logits(state: None, event: Computed) -> Iterator[Any]:
    value, scope = event.value, event.scope
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
    if scope.enabled is not False and (half or may_be_half(given.dtypes)) and logits(given):
        message = of_logits(given)
        if value.op == "loss":
            if not may_be_half(value.dtypes):  # autocast lifts it
                return
            message = f"{value.name} of {short(given.dtypes)} predictions: differences and their mean are rounded; cast them to float first"
        if value.op == "criterion":
            message = f"'{value.name}' is given {short(given.dtypes)} logits: unless it widens them its loss is rounded; cast them to float first"
        needs = (TRAINING, Shows("half"))
        yield hit("loss-on-half-logits", value, "possible", message, needs, logits_at(given))


LOSSES = frozenset({"cross_entropy", "criterion", "loss"})


def of_logits(given: Value) -> str:
    return (
        f"cross entropy of {short(given.dtypes)} logits: the loss is off in its third digit, "
        "and so are its gradients; cast the logits to float first"
    )


def logits_at(given: Value) -> tuple[Seen, ...]:
    return (Seen(given.at, "the logits"),) if given.at is not None else ()


def cast_to_half(value: Value) -> bool:
    return value.op == "cast" and known_half(value.dtypes)


GATES = re.compile(r"gate|gating|rout|moe|expert", re.I)


@FAMILY.rule("half-router", Computed)
def half_router(state: None, event: Computed) -> Iterator[Any]:
    """Experts chosen by sigmoid scores or logits in half; a softmax in half is softmax-in-half."""
    value = event.value
    if value.op != "topk" or not value.inputs or not trains(event.scope):
        return
    if not GATES.search(f"{event.scope.owner} {event.scope.function}"):
        return
    for source in sources(value.inputs[0], frozenset({"view", "either", "attribute", "add"})):
        how = grade(source.dtypes, event.scope)
        if how is None or (
            source.op not in ("sigmoid", "linear") and not (source.op == "layer" and source.name == "Linear")
        ):
            continue
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


@FAMILY.rule("half-running-sum", Computed)
def half_running_sum(state: None, event: Computed) -> Iterator[Any]:
    """A total that outlives the call (an attribute of the object), or one that a loop carries from batch to batch."""
    value, scope = event.value, event.scope
    yield from gram_sum(event)
    yield from narrow_metric(event)
    yield from narrow_prefixes(event)
    yield from narrow_total(event)
    yield from narrow_products(event)
    if value.op != "add" or len(value.inputs) != 2 or scope.kind == "test":
        return
    total, term = value.inputs
    # What follows the weights is a buffer of a module, and those are seldom cast.
    if not known_half(total.dtypes) or not known_half(value.dtypes) or term.dtypes <= frozenset({"number"}):
        return
    kept = value.name == "in-place state"
    if not kept and (scope.kind == "module" or not carried(value, total) or not apart(term, scope)):
        return
    reduced = find(term, lambda v: v.op in REDUCED, lambda v: v.op in ("layer", "linear"), 16)
    if reduced is None or find(total, lambda v: v.op == "gradient", limit=8):
        return
    yield hit(
        "half-running-sum",
        value,
        "certain",
        f"a sum over many steps is kept in {short(total.dtypes)}: in bf16 it stands still once it is 256 times "
        "its terms (fp16: 2048); keep it in fp32",
        (),
        (Seen(reduced.at, "what is added"),),
    )


def gram_sum(event: Computed) -> Iterator[Any]:
    """``covariance.add_(x.mT @ x)``: products of a tensor with itself, added up over batches."""
    value, scope = event.value, event.scope
    if value.op not in ("add", "lerp") or len(value.inputs) < 2 or scope.kind == "test":
        return
    if value.op == "add" and not value.name.startswith("in-place"):
        return
    total, term = value.inputs[:2]
    if value.name != "in-place state" and not all(source.op in KEPT for source in sources(total)):
        return
    for gram in sources(term, VIEWS | {"div"}):
        if gram.op != "matmul" or len(gram.inputs) < 2 or not same(gram.inputs[0], gram.inputs[1]):
            continue
        how, factor = grade(gram.dtypes, scope), next(sources(gram.inputs[0]))
        if how is None or (how != "certain" and factor.op == "cast"):  # a dtype that somebody chose
            continue
        yield hit(
            "half-running-sum",
            gram,
            "likely" if how == "certain" else "possible",
            f"the product of a tensor with itself is stored in {kept_in(how, gram.dtypes)} and added up: 8 bits of bf16 do not hold the small "
            "eigenvalues of a covariance, and fp16 overflows; cast the tensor to float first",
            (Shows("half"),),
            (Seen(value.at, "added up"),),
            severity="warning",
        )
        return


def narrow_metric(event: Computed) -> Iterator[Any]:
    """``self.total += probabilities.log().sum()``: a metric whose terms are made of exponentials or logs of logits in the logits' dtype; and
    ``total += loss.detach()`` from 0 on, where the total takes the dtype of the losses."""
    value, scope = event.value, event.scope
    if value.op != "add" or len(value.inputs) != 2 or scope.kind == "test" or scope.enabled is False:
        return
    total, term = value.inputs
    kept = value.name.startswith("in-place") and (value.name == "in-place state" or carried(value, total))
    if not kept or known_half(value.dtypes) or not may_be_half(term.dtypes - NUMBER) or not apart(term, scope):
        return
    made = find(term, lambda v: v.op in LOGARITHMIC, lambda v: v.op in ("layer", "linear"), 24)
    reduced = find(term, lambda v: v.op in REDUCED, lambda v: v.op in ("layer", "linear"), 16)
    if made is None or reduced is None or not made.inputs or not logits_within(made):
        return
    yield hit(
        "half-running-sum",
        made,
        "possible",
        f"what a metric adds up is computed in {kept_in('likely', made.dtypes)}: exponentials and logs in bf16 are off in the third digit, and so "
        "is the metric; cast the logits to float first",
        (Shows("half"),),
        (Seen(reduced.at, "what is added"), Seen(value.at, "added up")),
    )


def narrow_prefixes(event: Computed) -> Iterator[Any]:
    """``values.cumsum(-2)`` of what layers give: every prefix is stored in their dtype. ``log_probabilities.sum(-1)``: that of all classes
    is far below what fp16 holds."""
    value, scope = event.value, event.scope
    if value.op not in ("cumsum", "sum") or not value.inputs or "dtype" in value.options or not trains(scope):
        return
    if scope.enabled is False or not may_be_half(value.dtypes):
        return
    if value.op == "cumsum":
        made = next((s for s in sources(value.inputs[0]) if s.op in ("layer", "linear", "matmul")), None)
        what = "sums over all positions so far are kept in {}: in bf16 a long one stands still, and fp16 is inf above 65504"
    else:
        along = number(value.option("dim", 1))
        made = next((s for s in sources(value.inputs[0], VIEWS | {"neg"}) if s.op == "log_softmax"), None)
        made = made if along == -1 else None
        what = "the log-probabilities of all classes are summed in {}: of 50000 that is above 65504, which is inf in fp16, and off by 1000 in bf16"
    if made is not None:
        yield hit(
            "half-running-sum",
            value,
            "possible",
            f"{what.format(kept_in('possible', value.dtypes))}; give it dtype=torch.float32",
            (TRAINING, shown_by(value.dtypes)),
            (Seen(made.at, "what is added up"),),
        )


def narrow_total(event: Computed) -> Iterator[Any]:
    """``total += loss.detach()`` from 0 on: the total takes the dtype of the losses."""
    value, scope = event.value, event.scope
    if value.op != "add" or len(value.inputs) != 2 or value.name not in ("in-place", "in-place state"):
        return
    total, term = value.inputs
    if scope.kind == "test" or not (total.dtypes <= STARTED or may_be_half(total.dtypes - NUMBER)):
        return
    apart = ("detach", "clone", "data") if "number" in total.dtypes else ("detach", "clone")
    kept = find(term, lambda v: v.name in apart, lambda v: v.op != "view", 6)
    if (
        kept is None
        or not ("?" in term.dtypes or may_be_half(term.dtypes))
        or any(atom in RANK for atom in term.dtypes)
    ):
        return
    if find(term, lambda v: v.op in ("gradient", "weight", "parameter", "buffer"), lambda v: v.op in LOSSES, 16):
        return  # an average of weights, a sum of gradients
    yield hit(
        "half-running-sum",
        value,
        "possible",
        f"a total that began as a number takes the dtype of what is added, {kept_in('possible', term.dtypes)}: in bf16 it stands still once it "
        "is 256 times its terms; add .float() of them",
        (TRAINING, Shows("half")),
        (Seen(term.at, "what is added"),) if term.at is not None else (),
    )


def narrow_products(event: Computed) -> Iterator[Any]:
    """``total = torch.zeros_like(weight)`` and in a loop ``total += a.T @ b``: the gradient of a weight, chunk by chunk; and
    ``total = torch.zeros(n, dtype=x.dtype)`` with ``total += chunk.sum(0)``."""
    value, scope = event.value, event.scope
    if value.op != "add" or len(value.inputs) != 2 or scope.kind == "test" or not carried(value, value.inputs[0]):
        return
    total, term = value.inputs
    made = next((s for s in sources(total) if s.op in ("zeros_like", "new_zeros", "zeros")), None)
    product = next((s for s in sources(term) if s.op in ("matmul", "sum")), None)
    if made is None or product is None or not may_be_half(made.dtypes):
        return
    chosen = made.options.get("dtype")
    if chosen is not None and chosen.op != "dtype_of":
        return
    yield hit(
        "half-running-sum",
        made,
        "possible",
        f"{'products' if product.op == 'matmul' else 'sums'} are added up in {kept_in('possible', made.dtypes)}: each addition rounds, in bf16 "
        "to 8 bits; make the total with "
        "dtype=torch.float32, and cast it once",
        (Shows("half"),),
        (Seen(product.at, "what is added"), Seen(value.at, "added up")),
    )


STARTED = NUMBER | {"?"}
"""The dtypes of a total that a number began."""


LOGARITHMIC = frozenset({"log", "exp", "log_softmax", "logsumexp"})


def logits_within(made: Value) -> bool:
    """Whether logits are what an op was made of."""
    return find(made, logits, lambda v: v.op in ("layer", "linear"), 32) is not None


KEPT = frozenset({"input", "unknown", "buffer", "parameter"})
"""What was there before: an argument, a state."""

REDUCED = frozenset(
    {"sum", "matmul", "mean", "running_sum", "cross_entropy", "nll_loss", "loss", "bce", "bce_with_logits"}
)
"""What makes a few numbers of many: a loss, a count, a mean."""


def carried(value: Value, total: Value) -> bool:
    """Whether a sum is one that the round before left: its total may be the result of this very addition."""
    return any(source.op == "add" and source.at == value.at for source in sources(total))


def apart(term: Value, scope: Scope) -> bool:
    """Whether no gradient is taken of a term: it is a metric, not a part of the loss."""
    if not scope.grad:
        return True
    return (
        find(term, lambda v: v.op == "test" or v.name in ("detach", "data"), lambda v: v.op in ("layer", "linear"), 16)
        is not None
    )
