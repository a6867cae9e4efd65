"""Reads Triton's own IR as text: the dots of a kernel, what they accumulate into, and sums in half precision.

It knows the textual form of TTIR after triton's passes (the stage that all targets share), not how it was compiled.
Where the text is not as expected the answer is 'unknown', never 'fine'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from precisionlint.patterns import regex

HALF = ("f16", "bf16")

_LOCATION = regex(r"^(#loc\d*) = loc\((.*)\)$")
_FILE = regex(r'"([^"]+)":(\d+):\d+')
_USE = regex(r"\bloc\((#loc\d*)\)\s*$")
_RESULT = regex(r"^(%[\w.-]+)(?::(\d+))? = ")
_DOT = regex(r"= tt\.dot (%[\w#.-]+), (%[\w#.-]+), (%[\w#.-]+)")
_SCALED_DOT = regex(r"= tt\.dot_scaled .*?, (%[\w#.-]+) lhs = (\w+) rhs = (\w+)")
_TENSOR = regex(r"tensor<((?:\d+x)*)([\w]+)>")
_IMPRECISE = regex(r"maxNumImpreciseAcc = (\d+)")
_CARRIED = regex(r"iter_args\((.*?)\) ->")


class Spot(Struct, frozen=True):
    """A place in the kernel's source; line 0 where the IR does not say."""

    path: str
    line: int


class Dot(Struct, frozen=True):
    """One dot of a kernel."""

    a: str
    b: str
    result: str
    """MLIR's names of the element types, such as f8E4M3FN, bf16, f32."""
    inner: int
    """K of this one dot; 0 where it is unknown."""
    carried: bool | None
    """Whether it accumulates into a value that the loop around it hands on; None where the walk cannot tell."""
    imprecise: int | None
    """maxNumImpreciseAcc: how many terms may be added before they are promoted; None where the IR does not bound it."""
    tf32: bool
    spot: Spot


class HalfSum(Struct, frozen=True):
    """An addition in fp16 or bf16 that takes part in a sum."""

    kind: str
    """'loop' where a loop hands the sum on, 'reduction' inside of a tt.reduce."""
    dtype: str
    spot: Spot


class _Region(Struct):
    carried: tuple[str, ...]
    reduce: bool


def dots(text: str) -> tuple[Dot, ...]:
    """Every tt.dot and tt.dot_scaled of a module, in its order."""
    lines, places = text.splitlines(), _places(text)
    definitions, loops = _definitions(lines), _loops(lines)
    found = []
    for number, line in enumerate(lines):
        plain, scaled = _DOT.search(line), _SCALED_DOT.search(line)
        if not plain and not scaled:
            continue
        tensors = _TENSOR.findall(line)
        accumulator = plain.group(3) if plain else scaled.group(1) if scaled else ""
        if plain and len(tensors) == 3:
            a, b = tensors[0][1], tensors[1][1]
            inner = int(tensors[0][0].rstrip("x").split("x")[-1])
        else:
            a, b = (scaled.group(2), scaled.group(3)) if scaled else ("unknown", "unknown")
            inner = 0
        bound = _IMPRECISE.search(line)
        found.append(
            Dot(
                a=a,
                b=b,
                result=tensors[-1][1] if tensors else "unknown",
                inner=inner,
                carried=_carried(accumulator, number, definitions, loops),
                imprecise=int(bound.group(1)) if bound else None,
                tf32=a == b == "f32" and "inputPrecision = tf32 " in f"{line} ",
                spot=_spot(line, places),
            )
        )
    return tuple(found)


def half_sums(text: str) -> tuple[HalfSum, ...]:
    """Additions in half precision whose sum goes around a loop, or that stand in a reduction."""
    lines, places = text.splitlines(), _places(text)
    loops = _loops(lines)
    found = []
    for number, line in enumerate(lines):
        if "arith.addf" not in line:
            continue
        dtype = re.search(r": (?:tensor<(?:\d+x)*)?(\w+)>? loc\(", line)
        if dtype is None or dtype.group(1) not in HALF:
            continue
        regions = loops[number]
        operands = set(re.findall(r"%[\w.-]+", line.partition("=")[2]))
        if any(region.reduce for region in regions):
            found.append(HalfSum("reduction", dtype.group(1), _spot(line, places)))
        elif any(operands & set(region.carried) for region in regions):
            found.append(HalfSum("loop", dtype.group(1), _spot(line, places)))
    return tuple(found)


def _carried(
    accumulator: str, number: int, definitions: Mapping[str, str], loops: list[tuple[_Region, ...]]
) -> bool | None:
    """Whether a dot's third operand is handed on by a loop around it."""
    name = accumulator.partition("#")[0]
    if any(name in region.carried for region in loops[number]):
        return True
    made = definitions.get(name, "")
    if "arith.constant dense<0.000000e+00>" in made or "arith.constant dense<0.0>" in made:
        return False
    return None


def _definitions(lines: list[str]) -> Mapping[str, str]:
    found = {}
    for line in lines:
        if match := _RESULT.match(line.strip()):
            found[match.group(1)] = line
    return found


def _loops(lines: list[str]) -> list[tuple[_Region, ...]]:
    """For each line the loops and reductions that it stands in, from the outermost."""
    stack: list[_Region | None] = []
    found = []
    for line in lines:
        found.append(tuple(region for region in stack if region is not None))
        for opened in _balance(line):
            if opened:
                carried = _CARRIED.search(line) if "scf.for" in line or "scf.while" in line else None
                names = tuple(re.findall(r"(%[\w.-]+) =", carried.group(1))) if carried else ()
                reduce = '"tt.reduce"' in line
                stack.append(_Region(names, reduce) if names or reduce else None)
            elif stack:
                stack.pop()
    return found


def _balance(line: str) -> Iterator[bool]:
    """False for each region that a line closes, then True for each that it opens; an attribute's braces match."""
    depth, lowest = 0, 0
    for character in re.sub(r'"[^"]*"', "", line):
        depth += (character == "{") - (character == "}")
        lowest = min(lowest, depth)
    yield from [False] * -lowest
    yield from [True] * (depth - lowest)


def _places(text: str) -> Mapping[str, str]:
    return {match.group(1): match.group(2) for match in map(_LOCATION.match, text.splitlines()) if match}


def _spot(line: str, places: Mapping[str, str]) -> Spot:
    """The innermost place of a location that is not in triton's own library, or the innermost at all."""
    use = _USE.search(line)
    queue, seen, spots = [use.group(1)] if use else [], set(), []
    while queue:
        at = queue.pop(0)
        if at not in seen:
            seen.add(at)
            said = places.get(at, "")
            spots += [Spot(path, int(number)) for path, number in _FILE.findall(said)]
            queue += re.findall(r"#loc\d*", said)
    outside = [spot for spot in spots if not {"triton", "language"} <= set(spot.path.split("/"))]
    return (outside or spots or [Spot("", 0)])[0]
