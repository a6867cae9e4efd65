"""Positions in half: what counts them, and the angles that rotary embeddings make of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.checks.half_arithmetic import (
    AUTOCAST,
    HALF_WEIGHTS,
    TRAINING,
    grade,
    hit,
    kept_in,
    of_half,
    short,
    untold,
)
from precisionlint.checks.rotary_buffers import asked, frequencies_in_a_buffer, loaded_and_cast
from precisionlint.findings import Confidence
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    INTEGERS,
    NUMBER,
    VIEWS,
    Computed,
    Scope,
    Value,
    find,
    known_half,
    may_be_half,
    named,
    number,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-positions", None))

INTEGRAL = regex(r"(?:^~?|_)(?:ids?|idx|index|indices|labels?|tokens?|targets?|len(?:gth)?s?|pos(?:itions?)?)$", re.I)
"""What holds integers, by its name or that of what a dtype follows: more positions are of the dtype of those that are there."""

ROTARY = regex(r"rot(?:ary|ate|_)|rope", re.I)

FREQUENCIES = regex(r"inv_?freq|^freqs?$|frequenc")


LINEAR = VIEWS | {"mul", "div", "neg", "cast", "add"}
"""What an exponent is made of positions by."""


def frequencies(value: Value) -> Value | None:
    """The inverse frequencies in a value: by their formula (one over a power of positions, or an exponential of them) or by their name."""

    def wanted(v: Value) -> bool:
        if v.op in ("buffer", "parameter", "input", "attribute", "unknown", "view") and FREQUENCIES.search(v.name):
            return True
        if v.op == "div" and len(v.inputs) == 2 and number(v.inputs[0]) == 1.0:
            return any(
                s.op in ("pow", "square_pow") and find(s, lambda a: a.op == "arange", limit=12)
                for s in sources(v.inputs[1])
            )
        if v.op == "exp" and v.inputs:  # exp(-log(10000) * arange(n) / n)
            return find(v.inputs[0], lambda a: a.op == "arange", lambda a: a.op not in LINEAR, 12) is not None
        if v.op != "pow" or number(v.inputs[0]) == 2.0:  # powers of two are exact
            return False
        return any(find(i, lambda a: a.op == "arange", limit=8) for i in v.inputs[1:])

    return find(value, wanted, lambda v: v.op in ("matmul", "outer", "cos", "sin", "layer", "linear"), 24)


POSITION = regex(
    r"^(?:t|ts|seq|ids|time(?:step)?s?|grid|coords?|seq_idx|idx)$|(?:^|_)(?:pos|position)s?(?:_(?:ids?|idx|index|indices))?$"
)


def positions(value: Value) -> bool:
    return (
        find(
            value,
            lambda v: v.op == "arange" or (v.op in ("input", "attribute", "index") and bool(POSITION.search(v.name))),
            lambda v: v.op in ("matmul", "outer", "layer", "pow", "cos"),
            16,
        )
        is not None
    )


BITS = ("bf16 has 8 bits", "fp16 has 11 bits", "bf16 has 8 bits")


@FAMILY.rule("half-rope", Computed, ops=("sin", "cos", "cast", "matmul", "outer", "mul", "div"))
def half_rope(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if value.op in ("sin", "cos") and value.inputs:
        yield from sines_of_product(value, event.scope)
        yield from sines_of_octaves(value, event.scope)
    if value.op == "cast" and known_half(value.dtypes):
        yield from tables_in_half(value, event.scope)
        yield from loaded_and_cast(value, event.scope)
    if value.op not in ("matmul", "outer", "mul", "div") or len(value.inputs) < 2 or event.scope.kind == "test":
        return
    left, right = value.inputs[0], value.inputs[1]
    for place, freq in ((left, right),) if value.op == "div" else ((left, right), (right, left)):
        made = frequencies(freq)
        if made is None or frequencies(place) is not None or not positions(place):
            continue
        if value.op == "div" and find(place, lambda v: v.op == "div" and len(v.inputs) > 1, limit=16) is not None:
            continue  # shares of a length
        held = next((s for s in sources(freq) if s.op == "buffer" and "~weights" in s.dtypes), None) or asked(freq)
        if not event.scope.setup and not in_turns(place):
            yield from frequencies_in_a_buffer(held, freq, value, event.scope)
        how = grade(value.dtypes, event.scope)
        cast = find(value, lambda v: v.op == "cast" and may_be_half(v.dtypes), lambda v: v.op in COUNTED, 16)
        if how not in (None, "certain") and cast is None and held is not None and value.op != "matmul":
            # What the buffer loses is told there; positions that take its dtype lose on their own.
            how = "possible" if find(place, counted_alike, lambda v: v.op not in VIEWS | {"arange"}, 8) else None
        if how == "likely" and held is not None and held.ref in ("chosen", "tabled"):
            how = "possible" if held.ref == "tabled" else None
        if how == "likely" and event.scope.setup and not value.dtypes.isdisjoint({"~weights", "^weights"}):
            how = "possible"  # before a model is cast its weights are half only where tensors are made so
        if how is not None:
            # Positions that come as they are, are half only where everything is.
            needs = shown_by(value.dtypes) if value.op == "matmul" or cast is not None else HALF_WEIGHTS
            yield angles_in_half(
                value, how, made, event.scope, AUTOCAST if held is not None and cast is None else needs
            )
        elif value.op == "matmul" and run_in_half(value, event.scope):
            yield Hit(
                "half-rope",
                value.at,
                f"{angles(event.scope)} come from a matmul of fp32 positions and frequencies, which autocast runs in half wherever a caller "
                "has it on: positions above 256 round in bf16; disable autocast around it, or multiply elementwise",
                (),
                confidence="likely",
                needs=(AUTOCAST,),
            )
        return


def angles_in_half(value: Value, how: Confidence, made: Value, scope: Scope, needs: Any) -> Hit:
    """Angles that a product, or a division by wavelengths, makes in half."""
    divided = value.op == "div"
    return hit(
        "half-rope",
        value,
        how,
        f"{angles(scope)} are made in {made_in(how, value)}: {of_half(value.dtypes, *BITS)} for "
        f"{'a position divided by a wavelength' if divided else 'position times frequency'}, and the cosine is wrong by up to 2.0 within 8k "
        "positions; make them in fp32",
        (TRAINING, needs),
        (Seen(made.at, f"the {'wavelengths' if divided else 'frequencies'}"),) if made.at is not None else (),
    )


def run_in_half(value: Value, scope: Scope) -> bool:
    """Whether a product of fp32 is one that a caller's autocast runs in half: it leaves fp64 alone."""
    wide = "float32" in value.dtypes and "float64" not in value.dtypes
    return wide and scope.enabled is None and not scope.setup and not made_on_cpu(value)


PLACED = frozenset({"arange", "linspace"})


def made_on_cpu(value: Value) -> bool:
    """Whether all that goes into a product is made where nobody says on which device, and moved no sooner than it: autocast for a GPU leaves
    that alone."""

    def elsewhere(v: Value) -> bool:
        if v.op in PLACED:
            return "device" in v.options
        return not v.inputs and v.op != "constant" and v.dtypes != NUMBER

    def known(v: Value) -> bool:
        return v.op in PLACED or v.dtypes == NUMBER

    return find(value, lambda v: v.op in PLACED, known) is not None and find(value, elsewhere, known) is None


def sines_of_product(value: Value, scope: Scope) -> Iterator[Any]:
    """``(2 * pi * (coordinates @ directions)).sin()``: autocast runs the product in half, whatever its operands are."""
    product = find(value, lambda v: v.op == "matmul", lambda v: v is not value and v.op not in ANGLES, 12)
    if product is None or product.op != "matmul" or scope.enabled is not None or scope.setup or scope.kind == "test":
        return
    if "float64" in product.dtypes or known_half(product.dtypes):
        return
    if any(s.op == "cast" and "float32" in s.dtypes for each in product.inputs for s in sources(each)):
        return  # who cast an operand has thought of its dtype
    yield hit(
        "half-rope",
        product,
        "possible",
        "angles come from a product of matrices, which autocast runs in half wherever a caller has it on: in bf16 an angle of 8 is off by 0.03, "
        "and one of 256 by 1; disable autocast around it, or multiply elementwise",
        (AUTOCAST,),
        (Seen(value.at, f"its {value.op}"),),
    )


OCTAVES = regex(r"freq(?:uency)?_?bands?|^bands$|^freqs?$|^octaves$")


def octaves(value: Value) -> bool:
    """Whether a factor is powers of two, by how it is made or by its name."""

    def wanted(v: Value) -> bool:
        if v.op in ("exp2", "pow") and v.inputs:
            exponents = v.inputs[-1]
            return (v.op == "exp2" or number(v.inputs[0]) == 2.0) and find(exponents, counted, limit=8) is not None
        return v.op in ("buffer", "input", "attribute", "index", "view") and bool(OCTAVES.search(v.name))

    def counted(v: Value) -> bool:
        return v.op in ("arange", "linspace", "range")

    def stop(v: Value) -> bool:
        return v.op in ("matmul", "layer", "linear", "sin", "cos") or v.dtypes == NUMBER

    return find(value, wanted, stop, 16) is not None


def sines_of_octaves(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch.sin(x * 2 ** torch.arange(8))``: Fourier features of numbers in the dtype that they come in."""
    product = find(
        value.inputs[0], lambda v: v.op == "mul" and len(v.inputs) == 2 and any(map(octaves, v.inputs)), unmade, 12
    )
    if product is None or scope.enabled is False or scope.setup or scope.kind == "test":
        return
    of = next((each for each in product.inputs if not octaves(each)), None)
    how = grade(product.dtypes, scope)
    if of is None or how is None or of.dtypes == NUMBER or positions(of):
        return
    yield hit(
        "half-rope",
        product,
        "possible",
        f"sines are taken of numbers times powers of two, in {kept_in(how, product.dtypes)}: an angle of 400 has steps of 2 in bf16 and of 0.25 in "
        "fp16; multiply in fp32 and cast the sines",
        (shown_by(product.dtypes),),
        (Seen(value.at, f"its {value.op}"),),
    )


def unmade(value: Value) -> bool:
    """What angles are not looked for above."""
    return value.op not in ANGLES


def tables_in_half(value: Value, scope: Scope) -> Iterator[Any]:
    """``freqs.cos().bfloat16()``: the angles are right, and what is made of them is rounded."""
    table = find(value.inputs[0], lambda v: v.op in ("cos", "sin"), lambda v: v.op not in TABLES, 8)
    if table is None or not table.inputs or scope.kind == "test" or known_half(table.dtypes):
        return
    if not ROTARY.search(f"{scope.owner} {scope.function}"):
        return  # what is added to a vector, or given to a layer, turns nothing
    product = find(table, lambda v: v.op in ("outer", "matmul", "mul") and len(v.inputs) > 1, limit=16)
    if product is None or not any(frequencies(each) for each in product.inputs):
        return
    name = short(value.dtypes)
    yield hit(
        "half-rope",
        value,
        "possible",
        f"the {table.op} of rotary angles is kept in {name}: each is rounded to {'8' if name == 'bf16' else '11'} bits, so that turned vectors "
        "change their length, and what two of them give depends on where they stand; keep the tables in fp32, turn in fp32 and cast the result",
        (),
        (Seen(table.at, f"its {table.op}"),) if table.at is not None else (),
    )


TABLES = VIEWS | {"mul"}
ANGLES = VIEWS | {"mul", "add", "sub", "neg"}


def angles(scope: Scope) -> str:
    """What the angles are of, by the names of what makes them: rotary embeddings turn by them, others add their sines."""
    return "rotary angles" if ROTARY.search(f"{scope.owner} {scope.function}") else "angles of positions"


def made_in(how: str, value: Value) -> str:
    """The dtype of a product, in words: one of matrices is half under autocast, whatever its operands are."""
    if how != "certain" and value.op == "matmul" and value.dtypes <= {"~activations", "~weights"}:
        return "half wherever autocast is on or the weights are half"
    return kept_in(how, value.dtypes)


def in_turns(place: Value) -> bool:
    """Whether positions are shares of a turn, multiplied by pi or two: no frequency makes large angles of them."""
    return (
        find(place, lambda v: v.name.endswith(".pi") or (number(v) or 0.0) in (math.pi, 2 * math.pi), limit=16)
        is not None
    )


def counted_alike(value: Value) -> bool:
    """Whether positions are counted in the dtype of something else."""
    return value.op == "arange" and "dtype" in value.options and may_be_half(value.dtypes)


COUNTED = frozenset({"arange", "size", "buffer"})
"""What does not take the dtype of what it is made from: the count of a cast tensor is an integer."""


PLACES = regex(r"rope|rot(?:ary|ate)|pos(?:ition|_|[A-Z]|$)|embed|alibi|sinusoid|freqs?|sin_?cos|cos_?sin|\bYarn", re.I)
"""Functions and classes that make positions."""


CHANNELS = regex(r"dim|feat(?!_?(?:shape|size|map))|chan|embed|hidden|^[CD]$", re.I)


SAMPLES = regex(r"^b$|^bs$|bsz|batch", re.I)
SIDES = regex(r"^(?:num_|n_)?(?:grid|patch(?:es)?)_(?:[thw]|height|width|size|side)$")
"""The sides of a grid of patches, few of which are longer than the 256 that bf16 counts to."""
ROUNDS = regex(r"(?:^|_)(?:time|sampling_|inference_|diffusion_)?steps$", re.I)
"""How often a sampler goes round."""
FP16_ALONE = frozenset({"float16"})


@FAMILY.rule("half-arange", Computed, ops=("cast", "index_put", "arange", "sin", "cos", "sub", "test"))
def half_arange(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if event.scope.kind == "test":
        return
    if value.op == "cast":
        yield from cast_positions(value, event.scope)
    elif value.op == "index_put":
        yield from written_positions(value, event.scope)
    for place, use in used_as_positions(value, event.scope):
        made = made_in_half if place.op == "arange" else cast_positions
        yield from made(place, event.scope, Seen(value.at, use))
    if value.op == "arange" and "dtype" in value.options:
        yield from made_in_half(value, event.scope)


def made_in_half(value: Value, scope: Scope, use: Seen | None = None) -> Iterator[Any]:
    """Positions that are counted in half; ``use``: what shows that they are positions, where no name says it."""
    how = grade(value.dtypes, scope)
    chosen = value.dtypes - {"float32"}  # an argument that is fp32 unless a caller says otherwise
    if how is None and value.options["dtype"].op == "input" and chosen and may_be_half(chosen):
        how = "possible"
    bound = max((n for n in map(number, value.inputs) if n is not None), default=None)
    open_ended = any(number(v) is None for v in value.inputs)
    if how is None or (not open_ended and (bound or 0) <= 256):
        return
    asked = value.options["dtype"]
    of_integers = asked.op == "dtype_of" and named(asked.inputs[0], INTEGRAL)
    if how != "certain" and (of_integers or any(INTEGRAL.search(atom) for atom in value.dtypes)):
        return
    follows = how != "certain" or value.options["dtype"].op == "dtype_of"
    named_so = use is not None or PLACES.search(f"{scope.owner} {scope.function}") is not None
    if follows and ("~weights" in value.dtypes or not named_so):
        if not of_area(value) and ("~weights" in value.dtypes or not along(value)):
            return  # levels, bins and the like are few; positions in the dtype of frequencies are half-rope
        how = "possible" if how != "certain" else how
    if SAMPLES.search(end_of(value).name):
        return  # one number a sample
    if value.dtypes == FP16_ALONE and ROUNDS.search(end_of(value).name):
        return  # fewer than the 2048 that fp16 counts to
    if follows and few(value):
        return
    if SIDES.search(end_of(value).name):
        how = "possible"
    yield hit(
        "half-arange",
        value,
        how,
        COUNTS_TO.format(f"made in {kept_in(how, value.dtypes)}"),
        (shown_by(value.dtypes),),
        (use,) if use is not None else (),
        fix=Remedy(
            (Change("argument", value.at, "dtype", "torch.float32"),),
            "what is computed from the positions becomes fp32",
        ),
    )


COUNTS_TO = (
    "positions {}: bf16 counts to 256 and fp16 to 2048, then numbers repeat (2048 bf16 positions hold 641 values); make them in int64 or fp32 "
    "and cast what is computed from them"
)


def end_of(positions: Value) -> Value:
    return positions.inputs[-1 if len(positions.inputs) < 2 else 1]


def few(positions: Value) -> bool:
    """One number a channel, by the step or by what they are counted up to: exponents of frequencies. The ``d`` of ``d * h * w`` is a depth."""
    of_channels = find(end_of(positions), lambda v: CHANNELS.search(v.name) is not None, limit=6)
    return number(positions.option("step", 2)) == 2 or (
        of_channels is not None and not (len(of_channels.name) == 1 and of_area(positions))
    )


def of_area(positions: Value) -> bool:
    """Whether positions count the elements of several dimensions, as ``height * width`` does."""
    end = end_of(positions)
    product = find(end, lambda v: v.op == "mul" and len(v.inputs) == 2, lambda v: v.op not in ("add", "sub", "mul"), 8)
    return product is not None and all(number(each) is None or number(each) == 0 for each in product.inputs)


LENGTHS = regex(r"^[hwHWTL]$|(?:^|_)(?:height|width|len(?:gth)?|seq(?:uence)?|frames?|steps|tokens|positions)(?:_|$)")


def along(positions: Value) -> bool:
    """Whether positions count along a tensor, by its size or by what their end is called."""
    end = end_of(positions)
    sized = find(end, lambda v: v.op == "size" and v.name not in ("numel", "nelement"), limit=6) is not None
    return sized or LENGTHS.search(end.name) is not None


COMPARED = regex(r"len(?:gth)?s?$|^seq_?lens?$|^valid|^n_(?:frames|tokens|valid)|^cu_seqlens")
"""What positions are compared with."""
WAVES = frozenset({"sin", "cos"})


def used_as_positions(value: Value, scope: Scope) -> Iterator[tuple[Value, str]]:
    """What is counted in half, with what a value does with it that only positions are for, whatever the code is called: the sines of it
    times frequencies, the distances between all of it, a look-up, a comparison with lengths."""
    if value.op in WAVES and value.inputs:
        product = find(value.inputs[0], lambda v: v.op in PRODUCTS and len(v.inputs) == 2, unmade, 12)
        for place, other in (product.inputs, product.inputs[::-1]) if product is not None else ():
            told = product is not None and grade(product.dtypes, scope) is not None and frequencies(other) is not None
            if number(other) is None and other.dtypes != NUMBER and not told:  # by half-rope
                yield from ((each, f"its {value.op}, times frequencies") for each in counted_in_half(place))
    elif value.op == "sub" and len(value.inputs) == 2:
        left, right = (list(counted_in_half(each)) for each in value.inputs)
        if left and left == right and value.inputs[0] is not value.inputs[1]:
            yield left[0], "the distances between them"
    elif value.op == "cast" and value.inputs and value.dtypes <= INTEGERS:
        yield from ((each, "cast to an index") for each in counted_in_half(value.inputs[0]))
    elif value.op == "test" and len(value.inputs) == 2:
        for place, other in (value.inputs, value.inputs[::-1]):
            if named(other, COMPARED):
                yield from ((each, "compared with lengths") for each in counted_in_half(place))


PRODUCTS = frozenset({"mul", "outer", "matmul"})
STEPS = VIEWS | {"mul", "add", "div", "floordiv"}
"""What makes other positions of some."""


def counted_in_half(value: Value) -> Iterator[Value]:
    """The positions in a value that are made in half, or cast to it."""
    made = find(value, lambda v: v.op in ("arange", "cast"), lambda v: v.op not in STEPS, 12)
    if (
        made is not None
        and made.op == "cast"
        and made.inputs
        and any(s.op == "arange" for s in sources(made.inputs[0]))
    ) or (made is not None and made.op == "arange" and "dtype" in made.options):
        yield made


def cast_positions(value: Value, scope: Scope, use: Seen | None = None) -> Iterator[Any]:
    """``torch.arange(length).to(x.dtype)``, in what makes positions by its name or, as is seen, by its ``use``."""
    counted = next((s for s in sources(value.inputs[0]) if s.op == "arange"), None) if value.inputs else None
    if counted is None or not counted.inputs or not may_be_half(value.dtypes) or scope.enabled is False or scope.setup:
        return
    if "~weights" in value.dtypes or any(INTEGRAL.search(atom) for atom in value.dtypes):
        return
    named_so = use is not None or PLACES.search(f"{scope.owner} {scope.function}") is not None
    if not named_so or few(counted) or SAMPLES.search(end_of(counted).name):
        return
    if all(number(each) is not None for each in counted.inputs):
        return
    how = (grade(value.dtypes, scope) if use is not None else None) or "possible"
    yield hit(
        "half-arange",
        value,
        how,
        COUNTS_TO.format(f"cast to {kept_in(how, value.dtypes)}"),
        (shown_by(value.dtypes),),
        (use,) if use is not None else (),
    )


def written_positions(value: Value, scope: Scope) -> Iterator[Any]:
    """``ids = torch.zeros(h, w, 3, dtype=dtype)`` with ``ids[..., 1] = torch.arange(h)[:, None]``."""
    if len(value.inputs) != 3 or scope.enabled is False or not (may_be_half(value.dtypes) or untold(value)):
        return
    held, _, given = value.inputs
    counted = find(given, lambda v: v.op == "arange", lambda v: v.op not in VIEWS | {"add", "sub"}, 12)
    asked = held.options.get("dtype")
    if counted is None or asked is None or few(counted):
        return
    if any(INTEGRAL.search(atom) for atom in held.dtypes) or any(named(each, INTEGRAL) for each in asked.inputs):
        return
    if any(number(each) is not None for each in counted.inputs[:1]) and len(counted.inputs) == 1:
        return
    yield hit(
        "half-arange",
        held,
        "possible",
        COUNTS_TO.format(f"written into a tensor in {kept_in('possible', held.dtypes)}"),
        (shown_by(held.dtypes),),
        (Seen(value.at, "written here"),),
    )
