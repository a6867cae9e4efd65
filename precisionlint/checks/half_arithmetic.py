"""Arithmetic in half: what a range of 65504, or eight bits of precision, cannot carry.

Each rule is a pattern over a graph of values. A dtype that is known makes a finding certain; one that follows an input makes it likely,
and then the project itself must show half precision of the kind that reaches there (``Hit.needs``): what CUDA's autocast lifts to fp32
(softmax, exp, log, pow, sums) is half only where the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from precisionlint.checks.as_handed import DECAY as DECAY_OF
from precisionlint.checks.as_handed import NORM, told
from precisionlint.checks.base import Automaton, Family, Hit, Remedy, Seen
from precisionlint.facts import AsHanded
from precisionlint.findings import Confidence, Severity
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    HALF,
    NUMBER,
    RANK,
    UNKNOWN,
    VIEWS,
    WIDE,
    Computed,
    Dtypes,
    Scope,
    Shows,
    Value,
    find,
    known_half,
    may_be_half,
    named,
    same,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-arithmetic", None))

TRAINING, HALF_SHOWN, HALF_WEIGHTS = Shows("training"), Shows("half"), Shows("half weights")
FP16, AUTOCAST = Shows("fp16"), Shows("half autocast")

INFERENCE = regex(
    r"generat|sampl|predict|infer|eval|valid|export|decod|visual|plot|^test|convert|quantiz|beam|warp|detect"
)
"""Functions whose name says that they train nothing."""
SERVING = regex(
    r"get_(?:occ|bbox|result|pred)|simple_test|forward_test|post_?process|imageprocessor|hub_?interface|pipeline|predictor|fill_mask"
    r"|logits_?(?:processor|warper)|(?:greedy|beam|tree)_?search|(?:top_?[kp]|nucleus)_?sampl"
)


def grade(dtypes: Dtypes, scope: Scope) -> Confidence | None:
    """``"certain"`` or ``"likely"`` where a value is or may be half, ``"possible"`` where it may be on one path and nothing is known of the
    others, else None. Who disables autocast around an op has thought of its dtypes: there only what is known counts. And in a region that a
    setting switches on, what autocast lifts is fp32 where the region is what makes anything half."""
    if known_half(dtypes):
        return "certain" if WIDE.isdisjoint(dtypes) else "likely"  # one of those that a setting chooses from
    if scope.enabled is False or (lifts(scope) and all(atom[0] in "^?" for atom in dtypes)):
        return None
    if may_be_half(dtypes):
        return "likely"
    return "possible" if "?" in dtypes and may_be_half(dtypes - UNKNOWN) else None


def lifts(scope: Scope) -> bool:
    """Whether a setting switches a region on here, on CUDA as far as is known."""
    return scope.switched is not None and scope.switched.device in ("cuda", "")


def unless_handed_in(how: Confidence | None, value: Value, scope: Scope) -> Confidence | None:
    """The grade of what an autograd.Function makes of its arguments where no call of it was read: its callers cast them, or do not."""
    if how != "likely" or scope.kind not in ("forward", "backward"):
        return how
    names = {atom[1:] for atom in value.dtypes}
    return "possible" if find(value, lambda v: v.op == "input" and v.name in names, limit=40) is not None else how


def trains(scope: Scope) -> bool:
    """Whether what stands here can be part of a training step."""
    return scope.grad and scope.kind != "test" and not serves(scope.owner, scope.function)


@lru_cache(maxsize=512)
def serves(owner: str, function: str) -> bool:
    """Whether a function only uses a trained model, by its name and that of its class."""
    function = function.lower()
    return bool(INFERENCE.search(function) or SERVING.search(f"{owner.lower()} {function}"))


def short(dtypes: Dtypes) -> str:
    known = sorted({"float16": "fp16", "bfloat16": "bf16"}[atom] for atom in dtypes if atom in ("float16", "bfloat16"))
    return " or ".join(known) if known else "half"


def of_half(dtypes: Dtypes, bf16: str, fp16: str, both: str) -> str:
    """What follows from a half dtype, in words: from the one that is known, else from ``both``."""
    known = dtypes & HALF
    return {frozenset({"bfloat16"}): bf16, frozenset({"float16"}): fp16}.get(known, both)


def stalls(dtypes: Dtypes) -> str:
    """Where a sum in half ends."""
    ends = "it stands still once it is {} times its terms"
    return of_half(dtypes, ends.format(256), ends.format(2048), f"in bf16 {ends.format(256)} (fp16: 2048)")


def kept_in(how: str, dtypes: Dtypes) -> str:
    """The dtype that something is kept in, in words: ``bf16``, or ``the dtype of 'x'``."""
    return short(dtypes) if how == "certain" else f"the dtype of {likely_of(dtypes)}"


def likely_of(dtypes: Dtypes) -> str:
    """What a dtype follows, in words: ``the weights``, ``'x'``."""
    names = sorted(atom[1:] for atom in dtypes if atom[0] in "~^")
    if not names:
        return "what it is given" if "?" in dtypes else short(dtypes)
    plain = {
        "weights": "the weights",
        "activations": "what layers return",
        "layer()": "what layers return",
        "autocast": "the region",
        "region": "the region",
    }
    if names[0].endswith("()"):  # of a module that a list or a table holds
        return plain["layer()"]
    return plain.get(names[0], f"'{names[0]}'")


def hit(
    rule: str,
    value: Value,
    grade_: Confidence,
    message: str,
    needs: tuple[Shows, ...],
    trace: tuple[Seen, ...] = (),
    fix: Remedy | None = None,
    severity: Severity | None = None,
) -> Hit:
    """A finding at a value; what is certain needs nothing but a program that trains."""
    if grade_ == "certain":
        needs = tuple(need for need in needs if need is TRAINING)
    return Hit(rule, value.at, message, trace, severity, grade_, needs=needs, fix=fix)


def operand_of_square(value: Value) -> Value | None:
    """x of ``x * x``, ``x.square()``, ``x.pow(2)``, ``x ** 2``, where x may be a difference that is written twice."""
    if value.op in ("square", "square_pow"):
        return value.inputs[0]
    if value.op == "mul" and len(value.inputs) == 2 and alike(*value.inputs):
        return value.inputs[0]
    return None


def alike(left: Value, right: Value) -> bool:
    """Whether two values are one, or the difference of the same two."""
    if same(left, right):
        return True
    return (
        left.op == right.op == "sub"
        and len(left.inputs) == len(right.inputs) == 2
        and all(map(same, left.inputs, right.inputs))
    )


def mean_of_squares(value: Value, limit: int = 12) -> tuple[Value, Value, Value] | None:
    """(the mean, the square, x) where a value is the mean of x squared, or their sum, seen through additions, clamps, casts and views. A sum
    over a number is a mean."""
    for source in sources(value, frozenset({"view", "index", "either", "add", "clamp", "cast", "attribute"}), limit):
        if source.op == "div" and len(source.inputs) == 2 and source.inputs[1].dtypes == NUMBER:
            found = mean_of_squares(source.inputs[0], limit)
            if found is not None and found[0].op == "sum":
                return source, *found[1:]
        if source.op in ("mean", "sum") and source.inputs:
            for inner in sources(source.inputs[0]):
                operand = operand_of_square(inner)
                if operand is not None:
                    return source, inner, operand
    return None


# -- softmax, exp, log


@FAMILY.rule(
    "softmax-in-half",
    Computed,
    AsHanded,
    ops=("index_put", "log_softmax", "logsumexp", "log probabilities", "log", "topk", "argmax", "div"),
)
def softmax_in_half(state: None, event: Computed | AsHanded) -> Iterator[Any]:
    if isinstance(event, AsHanded):
        if event.what not in (NORM, DECAY_OF):
            yield told("softmax-in-half", event)
        return
    value, scope = event.value, event.scope
    if not trains(scope) or not value.inputs:
        return
    if value.op == "index_put":
        yield from kept_narrower(value, scope)
    elif value.op in ("log_softmax", "logsumexp"):
        yield from log_stored_in_half(value, scope)
    elif value.op == "log probabilities":
        yield from log_asked_of_others(value, scope)
    elif value.op == "log" and (total := sum_of_exp(value.inputs[0])) is not None:
        yield from logsumexp_by_hand(value, total, scope)
    elif value.op in ("log", "topk", "argmax"):
        yield from use_of_softmax(value, scope)
    elif value.op == "div" and len(value.inputs) == 2:
        yield from softmax_by_hand(value, scope)


def log_stored_in_half(value: Value, scope: Scope) -> Iterator[Any]:
    """``log_softmax``, ``logsumexp``: what a loss function is given may be anything; what a layer gives is half wherever half reaches it."""
    how = grade(value.dtypes, scope)
    made_here = any(
        s.op in ("linear", "matmul") or (s.op == "layer" and s.name == "Linear")
        for s in sources(value.inputs[0], VIEWS | SCALED)
    )
    if how not in (None, "certain") and not (how == "likely" and made_here and value.op == "logsumexp"):
        leaves = sources(value.inputs[0], VIEWS | SCALED | {"clamp"})
        scored = logits(value.inputs[0]) or any(named(each, SCORED) for each in (scaled_by(value.inputs[0]), *leaves))
        how = "possible" if made_here or scored else None
    elif how is None and untold(value) and named(value.inputs[0], LOGITS) and scope.enabled is not False:
        how = None if lifts(scope) else "possible"
    if how is not None:
        lifted = value.op == "log_softmax"
        yield hit(
            "softmax-in-half",
            value,
            how,
            f"{value.op} is stored in {kept_in(how, value.dtypes)}: bf16 is off by "
            f"up to 0.03 at values of 10; give it fp32 ({'dtype=torch.float32' if lifted else '.float()'})",
            (TRAINING, HALF_SHOWN if how == "possible" else shown_by(value.dtypes)),
        )


def log_asked_of_others(value: Value, scope: Scope) -> Iterator[Any]:
    """``selective_log_softmax(logits, labels)`` of another library."""
    given = value.inputs[0]
    if scope.enabled is not False and (may_be_half(given.dtypes) or untold(given)) and logits(given):
        message = (
            f"'{value.name}' is given the logits as they come: unless it widens them, its log-probabilities are off by up to 0.03 at values of "
            "10 in bf16; cast the logits to float first"
        )
        yield hit("softmax-in-half", value, "possible", message, (TRAINING, HALF_SHOWN))


def kept_narrower(value: Value, scope: Scope) -> Iterator[Any]:
    """``log_probs[chunk] = …`` into ``hidden.new_zeros(n)``: log-probabilities in the dtype of what they were made of."""
    if not LOG_PROBABILITY.search(value.name) or len(value.inputs) != 3 or value.inputs[2].op == "constant":
        return
    held = value.inputs[0]
    how = grade(held.dtypes, scope)
    if how is not None:
        yield hit(
            "softmax-in-half",
            held,
            "possible",
            f"log-probabilities are kept in {kept_in(how, held.dtypes)}: bf16 is off by up to 0.03 at values of 10; make room for them with "
            "dtype=torch.float32",
            (TRAINING, HALF_SHOWN),
            (Seen(value.at, "put there"),),
        )


def logsumexp_by_hand(value: Value, total: Value, scope: Scope) -> Iterator[Any]:
    """``x.exp().sum().log()``"""
    how = unless_handed_in(grade(total.dtypes, scope), total, scope)
    if how is not None:
        yield hit(
            "softmax-in-half",
            total,
            how,
            f"a logsumexp written by hand in {kept_in(how, total.dtypes)}: the sum of the exponentials is rounded before its log, and "
            "in fp16 it is inf above 65504; take torch.logsumexp of fp32",
            (TRAINING, shown_by(total.dtypes)),
            (Seen(value.at, "its log"),),
        )


def use_of_softmax(value: Value, scope: Scope) -> Iterator[Any]:
    """The log of a softmax, or what is largest in it."""
    through = VIEWS | {"add", "clamp"} if value.op == "log" else CHOSEN  # log(p + 1e-8)
    soft = next((source for source in sources(value.inputs[0], through) if source.op == "softmax"), None)
    if soft is None and value.op != "log":
        yield from rounded_before(value, scope)
    if soft is None or not soft.inputs:
        return
    how = grade(soft.dtypes, scope)
    if how is None and value.op == "topk" and untold(soft) and scope.enabled is not False:
        how = "possible" if named(soft.inputs[0], ROUTED) else None
    if how is not None and value.op == "log" and soft not in sources(value.inputs[0]):
        how = "possible"  # a number is added first: an entropy, most of the time, in which small values weigh little
    if how is not None:
        yield hit(
            "softmax-in-half",
            soft,
            how,
            f"softmax in {kept_in(how, soft.dtypes)} feeds {value.op}: {SPOILT[value.op]}; "
            "take it with dtype=torch.float32 and keep the result",
            (TRAINING, shown_by(soft.dtypes)),
            (Seen(soft.at, "softmax"), Seen(value.at, f"{value.op} of it")),
        )


def rounded_before(chosen: Value, scope: Scope) -> Iterator[Any]:
    """``softmax(logits.float(), -1).to(x.dtype).topk(2)``: probabilities are cast before the largest are looked for."""
    for cast in sources(chosen.inputs[0], CHOSEN):
        if cast.op != "cast" or not cast.inputs or not (known_half(cast.dtypes) or may_be_half(cast.dtypes)):
            continue
        soft = next((s for s in sources(cast.inputs[0], CHOSEN) if s.op == "softmax" and s.inputs), None)
        if soft is not None and "float32" in soft.dtypes and scope.enabled is not False:
            yield hit(
                "softmax-in-half",
                cast,
                "possible",
                f"probabilities are rounded to {kept_in('possible', cast.dtypes)} before {chosen.op}: near ones tie, and another one is chosen "
                "than in fp32; choose first and cast the weights of what was chosen",
                (TRAINING, shown_by(cast.dtypes)),
                (Seen(soft.at, "softmax in fp32"), Seen(chosen.at, f"{chosen.op} of it")),
            )
            return


SPOILT = {
    "log": "the log of its small values is far off",
    "topk": "near values tie, and which is chosen flips",
    "argmax": "near values tie",
}
"""What comes of a softmax that is rounded."""


def softmax_by_hand(value: Value, scope: Scope) -> Iterator[Any]:
    """``x.exp() / x.exp().sum()``"""
    top = next((source for source in sources(value.inputs[0]) if source.op == "exp"), None)
    total = next((s for s in sources(value.inputs[1], frozenset({"view", "either", "add"})) if s.op == "sum"), None)
    if top is None or total is None or not total.inputs:
        return
    how = unless_handed_in(grade(top.dtypes, scope), top, scope)
    if how is None or not any(of_one(top, s) for s in sources(total.inputs[0])):
        return
    yield hit(
        "softmax-in-half",
        value,
        how,
        f"a softmax written by hand in {kept_in(how, top.dtypes)}: exp and sum are "
        "rounded one by one, and without the maximum fp16 overflows above 11; torch.softmax accumulates in fp32",
        (TRAINING, shown_by(top.dtypes)),
        (Seen(top.at, "exp"), Seen(total.at, "its sum"), Seen(value.at, "their quotient")),
    )


CHOSEN = VIEWS | {"masked_fill", "largest", "sum"}
"""What keeps the order of probabilities, ties and all: some are masked, or a group goes by the sum of its largest."""


def untold(value: Value) -> bool:
    """Whether nothing is known of a dtype: neither that it is wide, nor what it follows."""
    return "?" in value.dtypes and not any(atom in RANK for atom in value.dtypes)


ROUTED = regex(r"^(?:rout(?:er|ing)|gat(?:e|ing))(?:_(?:logits?|scores?|weights?|out(?:put)?))?$")
"""What a program calls what its experts are chosen by."""
LOGITS = regex(r"logits?$|^(?:chosen|rejected?)_rewards?$|(?:^|_)pred(?:s|ictions?)?$")


def logits(value: Value) -> bool:
    """Whether a value is what a model gives, or is called logits."""
    return named(value, LOGITS) or any(source.op in ("layer", "linear") for source in sources(value, VIEWS | SCALED))


SCALED = frozenset({"div", "mul"})
"""By a temperature."""
SCORED = regex(r"(?:^|_)(?:scores?|outputs?|logits?|preds?|predictions?)(?:_|$)")
"""What may be called so elsewhere, but is what a model gives where its log-softmax is taken."""


def scaled_by(value: Value) -> Value:
    """What was divided by a temperature, or the value."""
    return value.inputs[0] if value.op in SCALED and value.inputs else value


def sum_of_exp(value: Value) -> Value | None:
    """The sum of exponentials that a value is, with a small number beside it or without."""
    for source in sources(value, frozenset({"view", "either", "add", "clamp"})):
        if source.op == "sum" and any(inner.op == "exp" for inner in sources(source.inputs[0])):
            return source
    return None


def of_one(top: Value, summed: Value) -> bool:
    """Whether what is summed is an exp itself, or one of the values that the exp was picked from."""
    if same(summed, top):
        return True
    if summed.op != "exp":
        return False
    bases = list(sources(summed.inputs[0]))
    return find(top.inputs[0], lambda v: any(v is base for base in bases), lambda v: v.op in PRODUCTS, 24) is not None


PRODUCTS = frozenset({"matmul", "linear", "layer"})
DECAY = regex(r"[Aa]_?log|log_?A|inv_A|a_param|decay|dt_bias|(?:nu|theta|gamma)_log|log_(?:a|lambda|dt|step)|lambda")

LOGARITHM = regex(r"(?:^|_)log_(?!its?)|_log$|^log_?(?:var|sigma|std|scale|dt)$")
"""What is called the logarithm of something (``log_scale``, ``threshold_log``); logits are none."""


@FAMILY.rule("exp-in-half", Computed, AsHanded, ops=("exp", "softplus", "exp2"))
def exp_in_half(state: None, event: Computed | AsHanded) -> Iterator[Any]:
    if isinstance(event, AsHanded):
        if event.what == DECAY_OF:
            yield told("exp-in-half", event)
        return
    value = event.value
    if not value.inputs or not trains(event.scope):
        return
    if value.op == "exp":
        yield from probability_ratio(value, event.scope)
    source = next(iter(sources(value.inputs[0])), None)
    if source is None or source.op != "parameter" or grade(value.dtypes, event.scope) != "likely":
        return
    if DECAY.search(source.name):
        how: Confidence = "likely"
        harm = "a decay of 0.999 is 1.0 in bf16"
    elif LOGARITHM.search(source.name):
        how, harm = "possible", "bf16 has steps of 1/32 from 4 on, each of them 3 % of the result"
    else:
        return
    yield hit(
        "exp-in-half",
        value,
        how,
        f"{value.op} of a parameter in the parameter's own dtype: where the weights are half, {harm}; take .float() first",
        (TRAINING, Shows("half weights", bare=True)),
    )


LOG_PROBABILITY = regex(r"log_?p(?:robs?|robabilit\w+|s)?$|(?:^|_)logps?(?:_|$)|logprobs?|log_?ratios?$")


def probability_ratio(value: Value, scope: Scope) -> Iterator[Any]:
    """``exp(new_logps - old_logps)``, or of such a difference by its name."""
    given = value.inputs[0]
    difference = next(
        (s for s in sources(given, VIEWS | {"clamp", "neg"}) if s.op == "sub" and len(s.inputs) == 2), None
    )
    if difference is None or not all(named(each, LOG_PROBABILITY) for each in difference.inputs):
        return
    if scope.enabled is False or not (untold(value) or may_be_half(value.dtypes)):
        return
    yield hit(
        "exp-in-half",
        value,
        "possible",
        f"a ratio of probabilities is taken in {kept_in('possible', value.dtypes)}: log-probabilities in bf16 are off by up to 0.03 at values "
        "of 10, and the ratio of two by up to 6 %; subtract and exponentiate in fp32",
        (TRAINING, HALF_SHOWN),
        (Seen(difference.at, "the difference"),),
    )
