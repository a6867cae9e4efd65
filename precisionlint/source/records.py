"""What the interpreter keeps book with: places, scopes, how paths end, what reading came across, and its bounds."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from precisionlint.events import Adopted, Copied, Event, Owns, Weights, WeightsTake, covers, moved, overlap
from precisionlint.source import program as p
from precisionlint.source.module import ProjectModule
from precisionlint.source.state import State
from precisionlint.source.values import Const, Value

NARROW, WIDEST = 2, 32
"""How many paths are followed side by side: few at first, so that every program is read to its end, then as many as the budget reaches
for. Those beyond are thinned out, and that is counted and said."""


BUDGET = 12_000
"""How many instructions one program may take, all widths together, before reading of it is given up."""


FILE_BUDGET = 45_000
"""How many instructions all programs of a file may take together."""


SHARE = 4
"""One part in so many of what is left is what a part of a program may take that is not the last: a method of a class, a call that may
lead to what trains and does not train itself."""


HALF = {"float16": "fp16", "bfloat16": "bf16"}
MIXED_FP16 = ("fp16", "16-mixed", "16", 16)
"""What frameworks call fp16 mixed precision."""
MIXED_BF16: dict[object, str] = {"bf16": "bfloat16", "bf16-mixed": "bfloat16"}
"""What they call bf16 mixed precision, which needs no scaler."""
ADAPTED = "an adapter is put over it"
"""How weights are frozen over which adapters are put."""


Args = tuple[tuple[str | None, Value], ...]


class Where(Struct, frozen=True):
    """A place in the source: a node of a module's tree, and the calls that led there, outermost first."""

    module: ProjectModule
    node: Any
    stack: tuple[tuple[ProjectModule, Any], ...]


class FrameInfo(Struct):
    """A scope: its module, the scope around it, and the names that it takes from elsewhere."""

    module: ProjectModule
    parent: int | None
    function: p.Function | None = None
    depth: int = 0
    outer: dict[str, int] = field(default_factory=dict)


class Paths(Struct):
    """How the paths through a block end: they fall through, or leave it."""

    states: list[State]
    exits: list[tuple[str, State, Value]]


class Taken(Struct, frozen=True):
    """Weights that took fp16 or bf16; ``call`` and ``ways``: the calls that led there, and the branches that were open."""

    dtype: str
    weights: Weights
    call: tuple[tuple[ProjectModule, Any], ...]
    ways: frozenset[str]


class Recipe(Struct):
    """How the programs of a file train, as far as it was seen.

    ``told``: frameworks whose settings outside of the program say what it computes in. ``halves``: weights that are half;
    ``stepped``: those of each optimizer, None where they are unknown; ``masters``: those of which an optimizer steps fp32 copies;
    ``copies``: those of copied models, which are there to be averaged or saved; ``adapted``: frozen ones with adapters over them.
    """

    regions: set[str] = field(default_factory=set)
    scalers: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    halves: set[Taken] = field(default_factory=set)
    stepped: set[Weights | None] = field(default_factory=set)
    masters: Weights = frozenset()
    copies: Weights = frozenset()
    adapted: Weights = frozenset()
    clips: set[str] = field(default_factory=set)

    def note(self, event: Event) -> None:
        """Keeps what an event tells of the weights' dtypes and of who steps them."""
        if isinstance(event, WeightsTake):
            call, ways = event.at.stack, frozenset(event.when)
            if event.dtype in HALF:
                self.halves.add(Taken(HALF[event.dtype], event.weights, call, ways))
            elif event.dtype is not None:  # what the same call made half goes back: an evaluation
                back = {one for one in self.halves if one.call == call and (one.ways <= ways or ways <= one.ways)}
                self.halves -= {one for one in back if covers(event.weights, one.weights)}
            elif event.how == ADAPTED:
                self.adapted |= event.weights
        elif isinstance(event, Owns) and event.copies_of is not None:
            self.masters |= event.copies_of
        elif isinstance(event, Owns):
            self.stepped.add(event.weights)
        elif isinstance(event, Copied):
            self.copies |= event.copy
            self.halves |= {
                replace(one, weights=event.copy) for one in self.halves if overlap(one.weights, event.weights)
            }
        elif isinstance(event, Adopted):
            self.halves = {replace(one, weights=moved(one.weights, event)) for one in self.halves}
            self.copies, self.masters = moved(self.copies, event), moved(self.masters, event)
            self.adapted = moved(self.adapted, event)
            self.stepped = {moved(held, event) if held is not None else None for held in self.stepped}

    def computes(self, framework: str, precision: Value | None) -> None:
        """Keeps what a framework's object computes in; one that is made without a precision asks whoever launches the program."""
        word = precision.value if isinstance(precision, Const) else None
        if precision is None and framework == "lightning":
            return  # its Trainer asks nobody
        if word in MIXED_FP16:
            self.regions.add("fp16")
            self.scalers.add(f"{framework}'s scaler")
        elif word in MIXED_BF16:
            self.regions.add("bf16")
        elif word is None:
            self.told.add(framework)

    def text(self) -> str:
        """In one line: ``fp16 autocast + GradScaler, AdamW on fp32 weights, clip 1.0``; empty where nothing trains."""
        if not self.optimizers:
            return ""
        forward = [f"{'/'.join(sorted(self.regions))} autocast"] if self.regions else []
        forward += sorted(self.scalers)
        forward = forward or [f"what {each} is told to compute in" for each in sorted(self.told)]
        parts = [" + ".join(forward) or "no autocast", f"{'/'.join(sorted(self.optimizers))} on {self.weights()}"]
        parts += [f"clip {'/'.join(sorted(self.clips))}"] if self.clips else []
        return ", ".join(parts)

    def weights(self) -> str:
        """What the optimizers step."""
        found = {self._kind(one.dtype, one.weights) for one in self.halves}
        return " and ".join(sorted(each for each in found if each)) or "fp32 weights"

    def _kind(self, dtype: str, held: Weights) -> str:
        """What is stepped of weights that are half, or nothing."""
        if overlap(held, self.masters):
            return f"fp32 copies of {dtype} weights"
        if overlap(held, self.adapted):
            return f"adapters over {dtype} weights"
        return f"{dtype} weights" if self._steps(held) else ""

    def _steps(self, weights: Weights) -> bool:
        """Whether an optimizer steps any of these weights, as far as it was seen; one that takes unknown ones takes no copies."""
        known = any(overlap(weights, own) is not False for own in self.stepped if own is not None)
        return known or (None in self.stepped and not covers(self.copies, weights))


class Coverage(Struct):
    """What reading came across."""

    programs: int = 0
    loops: dict[Any, Where] = field(default_factory=dict)
    optimizers: dict[Any, Where] = field(default_factory=dict)
    scalers: dict[Any, Where] = field(default_factory=dict)
    """What was come across -> where; of what a function is handed, the file that makes it says it."""
    recipe: Recipe = field(default_factory=lambda: Recipe())
    gave_up: dict[tuple[Any, Any], str] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    """The names of assumptions that some undecided value has."""


class BudgetError(Exception):
    """More paths than reading can follow: of a program (``call`` is None), or of one call in it."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.call = call
