"""Arithmetic in half: sums that stand still, over steps, over chunks and over ranks. The patterns and the grades are those of
``half_arithmetic``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Seen
from precisionlint.checks.half_arithmetic import (
    TRAINING,
    grade,
    hit,
    kept_in,
    logits,
    of_half,
    short,
    stalls,
    trains,
    untold,
)
from precisionlint.checks.half_limits import LOSSES
from precisionlint.checks.half_totals import totals
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.valueflow import (
    NUMBER,
    RANK,
    VIEWS,
    Called,
    Computed,
    Scope,
    Shows,
    Value,
    find,
    known_half,
    may_be_half,
    named,
    number,
    same,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-sums", None))


@FAMILY.rule("half-running-sum", Computed, Called, ops=("add", "lerp", "cumsum", "sum", "exp", "log10", "running_sum"))
def half_running_sum(state: None, event: Computed | Called) -> Iterator[Any]:
    """A total that outlives the call (an attribute of the object), or one that a loop carries from batch to batch."""
    value, scope = event.value, event.scope
    if isinstance(event, Called):
        yield from sum_over_ranks(value, scope)
        return
    yield from gram_sum(event)
    yield from narrow_metric(event)
    yield from narrow_prefixes(event)
    yield from narrow_total(event)
    yield from narrow_products(event)
    yield from totals(event)
    yield from listed(event)
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
    counted = kept and any(source.op in COUNTS for source in sources(total, VIEWS | {"cast"}))
    if (reduced is None and not counted) or find(total, lambda v: v.op == "gradient", limit=8):
        return
    yield hit(
        "half-running-sum",
        value,
        "certain" if reduced is not None else "possible",
        f"a sum over many steps is kept in {short(total.dtypes)}: {stalls(total.dtypes)}; keep it in fp32",
        (),
        (Seen(reduced.at, "what is added"),) if reduced is not None else (),
    )


COUNTS = frozenset({"zeros", "tensor", "as_tensor", "scalar_tensor", "full"})
"""What makes a tensor of numbers that the program writes down or counts."""


REDUCES = regex(r"(?:^|\.)(?:dist_|all_?)?(?:reduce|sum|mean)(?:_\w+)?$")
OTHERWISE = regex(r"MAX|MIN|PRODUCT|AND|OR$")
"""Reductions that add nothing up."""


def sum_over_ranks(value: Value, scope: Scope) -> Iterator[Any]:
    """``dist.all_reduce(torch.tensor([tokens], dtype=torch.bfloat16))``: a count, or what a metric sums up, over all ranks; and
    ``dist_sum(tokens, reduce_dtype=torch.bfloat16)``."""
    if scope.kind == "test" or not value.inputs:
        return
    asked = value.options.get("reduce_dtype")
    summed, how = value.inputs[0], value.option("op", 1)
    made: Value | None
    if asked is not None and REDUCES.search(value.name) and HALVES.get(asked.name.rpartition(".")[2]):
        name, made = HALVES[asked.name.rpartition(".")[2]], summed
    elif value.name == "torch.distributed.all_reduce" and known_half(summed.dtypes):
        counted = (source for source in sources(summed, VIEWS | {"cast"}) if source.op in COUNTS)
        name, made = short(summed.dtypes), next(counted, None)
        if made is None or (how is not None and OTHERWISE.search(how.name)):
            return
    else:
        return
    exact = {"bf16": "256", "fp16": "2048"}.get(name, "256 (fp16: 2048)")
    yield hit(
        "half-running-sum",
        value,
        "possible",
        f"numbers are summed over ranks in {name}: those above {exact} lose their last digits, and each addition rounds; reduce them in fp32",
        (),
        (Seen(made.at, "what is summed"),) if made.at is not None else (),
    )


SCATTERS = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_reduce"})


@FAMILY.rule("half-scatter", Computed, Called, ops=SCATTERS)
def half_scatter(state: None, event: Computed | Called) -> Iterator[Any]:
    """``torch.zeros_like(x).index_add_(0, rows, x)``: on CUDA each term is added into the result itself."""
    value, scope = event.value, event.scope
    if isinstance(event, Called):
        yield from scattered_by_others(value, scope)
        return
    if not value.inputs or scope.enabled is False or not trains(scope):
        return
    how = value.option("reduce", 4)
    if value.op.endswith("reduce") and (how is None or how.constant not in ("sum", "mean")):
        return
    total = value.inputs[0]
    made = next((s for s in sources(total, VIEWS | SCATTERS) if s.op in EMPTIED), None)
    if made is None or not (known_half(total.dtypes) or may_be_half(total.dtypes) or like_another(made)):
        return
    yield hit(
        "half-scatter",
        value,
        "possible",
        f"terms are added on rows in {short(total.dtypes) if known_half(total.dtypes) else kept_in('possible', total.dtypes)}: on CUDA each "
        f"addition is rounded, and of a sum of many {stalls(total.dtypes)}; add them up in fp32",
        (TRAINING, Shows("half")),
        (Seen(made.at, "the rows"),) if made.at is not None else (),
    )


SCATTERED = regex(
    r"^(?!torch\.|jax|jnp|numpy|tensorflow|tf\.|deepspeed|megatron)\w[\w.]*\.(?:scatter(?:_(?:sum|add|mean|reduce))?|segment_(?:sum|mean))$"
)
"""A function of another library that adds up rows: torch_scatter's, PyG's."""


def scattered_by_others(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch_scatter.scatter(messages, nodes, dim=0, reduce="sum")``"""
    if not SCATTERED.search(value.name) or not value.inputs or scope.enabled is False or not trains(scope):
        return
    terms, how = value.inputs[0], value.options.get("reduce")
    if how is not None and how.op == "constant" and how.constant not in ("sum", "add", "mean"):
        return
    if value.options.keys().isdisjoint({"dim", "dim_size", "index", "reduce"}) and len(value.inputs) < 3:
        return  # what sends parts to ranks or devices
    if not may_be_half(terms.dtypes) and not untold(terms):
        return
    yield hit(
        "half-scatter",
        value,
        "possible",
        f"'{value.name.rpartition('.')[2]}' adds up rows in {kept_in('possible', terms.dtypes)}: with atomic additions each is rounded, and a sum of "
        "many stands still at 256 times its terms in bf16 (fp16: 2048); give it .float()",
        (TRAINING, Shows("half")),
    )


EMPTIED = frozenset({"zeros", "zero_", "zeros_like", "new_zeros", "empty_like", "new_empty", "full_like", "new_full"})


def like_another(made: Value) -> bool:
    """Whether a tensor has the dtype of another one of which nothing is known."""
    if "dtype" in made.options:
        return made.options["dtype"].op == "dtype_of" and untold(made)
    return made.op != "zeros" and untold(made)


COVARIANCE = (
    "8 bits do not hold the small eigenvalues of a covariance",
    "what is above 65504 is inf, and 11 bits do not hold the small eigenvalues of a covariance",
    "8 bits of bf16 do not hold the small eigenvalues of a covariance, and fp16 overflows",
)


def gram_sum(event: Computed) -> Iterator[Any]:
    """``covariance.add_(x.mT @ x)``: products of a tensor with itself, added up over batches."""
    value, scope = event.value, event.scope
    if value.op not in ("add", "lerp") or len(value.inputs) < 2 or scope.kind == "test":
        return
    total, term = value.inputs[:2]
    again = value.op == "add" and carried(value, total)
    if value.op == "add" and not value.name.startswith("in-place") and not again:
        return
    held = sources(total, VIEWS | {"mul", "div"})  # an average is scaled before the next product is added
    if value.name != "in-place state" and not again and not all(source.op in KEPT for source in held):
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
            f"the product of a tensor with itself is stored in {kept_in(how, gram.dtypes)} and added up: {of_half(gram.dtypes, *COVARIANCE)}; "
            "cast the tensor to float first",
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
    held = value.name == "in-place state" or carried(value, total) or total.op == "index"  # of a list of totals
    kept = value.name.startswith("in-place") and held
    if not kept or known_half(value.dtypes) or not may_be_half(term.dtypes - NUMBER):
        return
    if scope.function == "update" and value.name == "in-place state":
        yield from narrow_update(value, term)
    if not apart(term, scope):
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


def narrow_update(value: Value, term: Value) -> Iterator[Any]:
    """``self.error += (preds - target).abs().sum()`` in ``update`` of a metric: the sum of a batch in the dtype of the predictions."""
    reduced = next((s for s in sources(term, VIEWS | {"neg", "mul", "div"}) if s.op == "sum"), None)
    if reduced is None or "dtype" in reduced.options or not reduced.inputs or logits(reduced.inputs[0]):
        return
    predicted = find(reduced.inputs[0], logits, lambda v: v.op in LOGARITHMIC | {"cast", "test"}, 24)
    if predicted is not None:
        yield hit(
            "half-running-sum",
            value,
            "possible",
            f"a metric sums up a batch in {kept_in('possible', reduced.dtypes)}: the sum is rounded to 8 bits in bf16, and inf above 65504 in "
            "fp16; cast the predictions to float first",
            (Shows("half"),),
            (Seen(reduced.at, "what is added"),) if reduced.at is not None else (),
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
        made = next((s for s in sources(value.inputs[0], VIEWS | {"neg"}) if s.op in ADDED_UP), None)
        if made is None and known_half(value.dtypes):
            made = value.inputs[0]
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
            f"{what.format(short(value.dtypes) if known_half(value.dtypes) else kept_in('possible', value.dtypes))}; give it dtype=torch.float32",
            (TRAINING, shown_by(value.dtypes)),
            (Seen(made.at, "what is added up"),),
        )


ADDED_UP = frozenset({"layer", "linear", "matmul", "sigmoid", "logsigmoid", "softplus", "log", "mul", "sum"})
"""What is added up along a sequence: activations, logs of gates, gradients; a mask is none of these."""


def narrow_total(event: Computed) -> Iterator[Any]:
    """``total += loss.detach()`` from 0 on: the total takes the dtype of the losses."""
    value, scope = event.value, event.scope
    if value.op != "add" or len(value.inputs) != 2:
        return
    total, term = value.inputs
    if value.name not in ("in-place", "in-place state") and not ("number" in total.dtypes and carried(value, total)):
        return
    if scope.kind == "test" or not (
        total.dtypes <= STARTED or may_be_half(total.dtypes - NUMBER) or begun_like(total, term)
    ):
        return
    if any(each.op == "mul" for each in sources(total)):
        return  # of what was there less is kept each time: an average
    if all(each.op in EMPTIED for each in sources(total)) and not carried(value, total):
        return  # a total of this call alone
    apart = ("detach", "clone", "data") if "number" in total.dtypes else ("detach", "clone")
    kept = find(term, lambda v: v.name in apart, lambda v: v.op != "view", 6)
    if (
        (kept is None and not evaluated(value, total, term, scope))
        or not ("?" in term.dtypes or may_be_half(term.dtypes))
        or any(atom in RANK for atom in term.dtypes)
    ):
        return
    if find(term, lambda v: v.op in ("gradient", "weight", "parameter", "buffer"), lambda v: v.op in LOSSES, 16):
        return  # an average of weights, a sum of gradients
    began = "was made like the first of them" if begun_like(total, term) else "began as a number"
    yield hit(
        "half-running-sum",
        value,
        "possible",
        f"a total that {began} takes the dtype of what is added, {kept_in('possible', term.dtypes)}: in bf16 it stands still once it "
        "is 256 times its terms; add .float() of them",
        (TRAINING, Shows("half")),
        (Seen(term.at, "what is added"),) if term.at is not None else (),
    )


def begun_like(total: Value, term: Value) -> bool:
    """Whether a total that stands already was made like what is added: ``if total is None: total = torch.zeros_like(loss)``."""
    held = list(sources(total))
    made = next((s for s in held if s.op == "zeros_like" and s.inputs and "dtype" not in s.options), None)
    return made is not None and len(held) > 1 and same(made.inputs[0], term)


def listed(event: Computed) -> Iterator[Any]:
    """``sum(losses) / len(losses)``: Python adds the members of a list up one by one, in their dtype."""
    value, scope = event.value, event.scope
    if value.op != "running_sum" or not value.inputs or scope.kind == "test" or scope.enabled is False:
        return
    for term in sources(value.inputs[0], frozenset({"many", "either"})):
        made = find(term, lambda v: v.op in LOSSES or v.name.endswith("loss"), limit=12)
        if made is None or not may_be_half(term.dtypes) or not apart(term, scope):
            continue
        if find(term, lambda v: v.name == "detach", lambda v: v.op != "view", 6) is None and scope.grad:
            continue
        yield hit(
            "half-running-sum",
            value,
            "possible",
            f"sum() adds numbers up one by one in {kept_in('possible', term.dtypes)}: {stalls(term.dtypes)}; take them by .item(), or "
            "torch.stack(…).float().mean()",
            (TRAINING, Shows("half")),
            (Seen(made.at, "what is added"),) if made.at is not None else (),
        )
        return


def evaluated(value: Value, total: Value, term: Value, scope: Scope) -> bool:
    """Whether a loop without gradients adds up what a model gives, from a number on; exponentials and logs are told where they are taken."""
    if scope.grad or "number" not in total.dtypes or not carried(value, total):
        return False
    made = find(term, lambda v: v.op in LOGARITHMIC | LOSSES | {"layer", "linear"}, limit=24)
    return made is not None and made.op not in LOGARITHMIC


def narrow_products(event: Computed) -> Iterator[Any]:
    """``total = torch.zeros(n, dtype=x.dtype)`` and in a loop ``total += chunk.sum(0)``, ``total += a.T @ b``. The gradient of a weight, chunk by
    chunk, is half-gradient-accumulation's."""
    found = added_up(event)
    if found is None or is_gradient(found[0]):
        return
    made, term = found
    yield hit(
        "half-running-sum",
        made,
        "possible",
        f"{'products' if term.op == 'matmul' else 'sums'} are added up in {kept_in('possible', made.dtypes)}: each addition rounds, in bf16 "
        "to 8 bits; make the total with "
        "dtype=torch.float32, and cast it once",
        (Shows("half"),),
        (Seen(term.at, "what is added"), Seen(event.value.at, "added up")),
    )


def added_up(event: Computed) -> tuple[Value, Value] | None:
    """(how a total is made, the product or the sum that a loop adds to it), where the total follows the dtype of something else."""
    value, scope = event.value, event.scope
    if value.op != "add" or len(value.inputs) != 2 or scope.kind == "test" or not carried(value, value.inputs[0]):
        return None
    total, term = value.inputs
    made = next((s for s in sources(total) if s.op in ("zeros_like", "new_zeros", "zeros")), None)
    product = next((s for s in sources(term) if s.op in ("matmul", "sum")), None)
    if made is None or product is None or not may_be_half(made.dtypes):
        return None
    chosen = made.options.get("dtype")
    if chosen is not None and not all(
        s.op == "dtype_of" or s.name.startswith("torch.get_autocast") for s in sources(chosen)
    ):
        return None
    return made, product


OF_A_LAYER = regex(r"weight|bias|kernel|(?:^|_)(?:w|b|proj|head|classifier|embeddings?)$|lm_head|vocab")
"""What the weights of a layer are called."""


def is_gradient(made: Value) -> bool:
    """Whether what is added up in the shape of a weight is its gradient: products of matrices, or sums over rows."""
    if made.op != "zeros_like" or not made.inputs:
        return False
    return any(s.op in ("parameter", "weight") for s in sources(made.inputs[0])) or named(made.inputs[0], OF_A_LAYER)


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
