"""Arithmetic in half: constants that it cannot hold, and the numbers that a training is steered by.

An epsilon below the least number, one minus an epsilon, noise that begins at zero; losses, choices of experts and totals. The patterns and
the grades are those of ``half_arithmetic``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.checks.half_arithmetic import (
    AUTOCAST,
    FP16,
    INFERENCE,
    TRAINING,
    grade,
    hit,
    kept_in,
    likely_of,
    short,
    trains,
)
from precisionlint.valueflow import (
    HALF_LAYERS,
    INTEGERS,
    NUMBER,
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

FAMILY = Family(Automaton("half-limits", None, lambda state, event: state))


# -- constants that a half dtype cannot hold


FP16_MAX = 65504.0
FILLS = {"masked_fill": ("value", 2), "index_fill": ("value", 3), "full_like": ("fill_value", 1), "fill_": ("value", 1),
         "new_full": ("fill_value", 2), "pad": ("value", 3)}  # fmt: skip
"""Ops that put one number into a tensor, and raise where its dtype does not hold it: the number's keyword and position."""
SCORES = re.compile(r"scores?$|attn|attention|energy|logits?$")


@FAMILY.rule("mask-constant-overflow", Computed)
def mask_constant_overflow(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if value.op not in FILLS or not value.inputs:
        return
    filled, constant = value.inputs[0], number(value.option(*FILLS[value.op]))
    if constant is None or not FP16_MAX < abs(constant) < float("inf"):
        return
    known = "float16" in filled.dtypes
    scores = find(filled, made_scores, lambda v: v.op in ("cast", "softmax", "layer"), 24)
    if not known and scores is None:
        return
    needs: tuple[Shows, ...] = () if known else (FP16,)
    if not known and not may_be_half(filled.dtypes):
        # What a matmul gives is half under autocast, whatever it is given.
        if event.scope.enabled is not None or not scaled_product(filled):
            return
        needs = (FP16, AUTOCAST)
    yield Hit(
        "mask-constant-overflow",
        value.at,
        f"{constant:g} does not fit fp16 (at most 65504): {value.op} raises on scores in fp16; torch.finfo(scores.dtype).min or -inf fits any dtype",
        (Seen(scores.at, "the scores, in half wherever fp16 autocast or fp16 weights reach"),)
        if scores is not None
        else (),
        confidence="certain" if known else "likely",
        needs=needs,
        # The constant stays wherever it fits: the least number instead of it may become -inf where masks are added up.
        fix=Remedy((Change("argument", value.at, "value@1", fitting(constant)),))
        if value.op == "masked_fill"
        else None,
    )


def scaled_product(value: Value) -> bool:
    """Whether a value is a matmul's result, or that by a number."""
    for source in sources(value):
        if source.op in ("mul", "div") and len(source.inputs) == 2 and source.inputs[1].dtypes == NUMBER:
            return scaled_product(source.inputs[0])
        return source.op == "matmul"
    return False


def made_scores(value: Value) -> bool:
    """Whether a value is scores: a product, what a layer gives that computes one, or what a function is given under such a name."""
    if value.op == "input":
        return bool(SCORES.search(value.name))
    return value.op in ("matmul", "linear") or (value.op == "layer" and value.name in HALF_LAYERS)


def fitting(constant: float) -> str:
    """A constant, or the number of the tensor's dtype that is nearest to it."""
    return "max({}, torch.finfo({tensor}.dtype).min)" if constant < 0 else "min({}, torch.finfo({tensor}.dtype).max)"


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
        f"the bound {bound:g} is 1.0 in bf16{' and fp16' if bound > 1 - 2**-12 else ''}: a probability of 1 passes the clamp, and log(1 - p) "
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
        if eps is None or not 0 < eps < 2**-25 or "float16" not in source.dtypes:
            continue
        message = (
            f"{eps:g} is 0 in fp16 (its least number is 6e-8): the guard guards nothing, and a zero that is {use} gives inf or NaN; "
            "do this in fp32, or with an eps of 1e-4"
        )
        trace = (Seen(source.at, "the guard"), Seen(value.at, use))
        yield hit("epsilon-underflow", source, "likely" if by_default else "certain", message, (), trace)
        return


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


# -- products that are scaled too late


SHOWN = frozenset({"view", "either", "index", "attribute", "cast"})
"""What shows a product again: a cast of what has overflowed comes too late."""
BOUNDED = frozenset({"softmax", "sigmoid", "tanh", "normalize", "layer_norm", "rms_norm", "norm", "mul", "div"})
"""What keeps the operands of a product small, or scales them before it."""


@FAMILY.rule("scale-after-matmul", Computed)
def scale_after_matmul(state: None, event: Computed) -> Iterator[Any]:
    """A product that has to fit fp16 before it is scaled down."""
    value, scope = event.value, event.scope
    if scope.kind == "test" or not value.inputs:
        return
    if value.op in ("mul", "div") and len(value.inputs) == 2:
        yield from dequantised(value, scope)
        if value.op == "div":
            yield from normalised_last(value, scope)


def dequantised(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch._int_mm(a, b) * scales``: sums of int8 products, which become half before they are scaled."""
    for product, factor in (value.inputs, value.inputs[::-1]):
        total = matmul_of(product, SHOWN - {"cast"})
        if total is None or not total.dtypes <= INTEGERS or not product.dtypes <= INTEGERS:
            continue
        known = "float16" in factor.dtypes
        if known or (may_be_half(factor.dtypes) and scope.enabled is not False):
            yield Hit(
                "scale-after-matmul",
                value.at,
                f"sums of integer products are cast to the dtype of {'the fp16 scales' if known else likely_of(factor.dtypes)} before they are "
                "scaled: 5 products of int8 can be above 65504, which is inf in fp16; multiply in fp32 and cast the result",
                (Seen(total.at, "the integer product"),),
                confidence="certain" if known else "likely",
                needs=() if known else (Shows("fp16"),),
            )
            return


def normalised_last(value: Value, scope: Scope) -> Iterator[Any]:
    """``q @ (k.T @ v) / (q @ k.sum())``: attention without a softmax, whose two sums grow with the length of the sequence."""
    above = matmul_of(value.inputs[0])
    below = matmul_of(value.inputs[1], SHOWN | {"add", "clamp"})
    if above is None or below is None or matmul_within(above) is None or bounded(above) or bounded(below):
        return
    how = grade(above.dtypes, scope)
    if how is None or (how == "certain" and "float16" not in above.dtypes):
        return
    if above is not below and not any(same(a, b) for a in above.inputs for b in below.inputs):
        return
    yield hit(
        "scale-after-matmul",
        value,
        how,
        f"both sums of this attention are stored in {fp16_of(how, above)} and divided afterwards: they grow with the sequence, fp16 is inf above "
        "65504, and inf by inf is NaN; take both products in fp32, with autocast disabled",
        (TRAINING, Shows("fp16")),
        (Seen(above.at, "the sum over all positions"),),
    )


def matmul_of(value: Value, through: frozenset[str] = SHOWN) -> Value | None:
    return next((source for source in sources(value, through) if source.op == "matmul"), None)


def matmul_within(product: Value) -> Value | None:
    """The product that is an operand of another."""
    return next((inner for each in product.inputs if (inner := matmul_of(each)) is not None), None)


def bounded(product: Value) -> bool:
    """Whether an operand of a product was scaled or normalised first."""

    def scaled(value: Value) -> bool:
        return value.op in BOUNDED and value.dtypes != NUMBER  # the products of sizes in a reshape are none

    def stop(value: Value) -> bool:
        return value.op in FRESH or value.dtypes == NUMBER

    return any(find(each, scaled, stop, 16) is not None for each in product.inputs)


FRESH = frozenset({"linear", "layer", "relu", "gelu", "exp"})
"""What gives values of any size, whatever was done before."""


def fp16_of(how: str, value: Value) -> str:
    return "fp16" if how == "certain" else f"the dtype of {likely_of(value.dtypes)}"


# -- logits and routers


@FAMILY.rule("loss-on-half-logits", Computed)
def loss_on_half_logits(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    region = event.scope.region
    if value.op != "cross_entropy" or not value.inputs or not trains(event.scope):
        return
    logits = value.inputs[0]
    if not known_half(logits.dtypes) or (region is not None and region.device != "cuda"):  # CPU's autocast lifts it
        return
    # A loss inside CUDA's region is how every program has it; there only a cast to half is this one's.
    if region is not None and not find(logits, cast_to_half, lambda v: v.op in ("layer", "linear", "matmul"), 24):
        return
    yield hit(
        "loss-on-half-logits",
        value,
        "certain",
        f"cross entropy of {short(logits.dtypes)} logits: the loss is off in its third digit, "
        "and so are its gradients; cast the logits to float first",
        (),
        (Seen(logits.at, "the logits"),) if logits.at is not None else (),
    )


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
