"""What the interpreter keeps book with: places, scopes, how paths end, what reading came across, and its bounds."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from precisionlint.events import Adopted, Copied, Event, Owns, Weights, WeightsTake, covers, moved, overlap
from precisionlint.source import program as p
from precisionlint.source.project import ProjectModule
from precisionlint.source.state import State
from precisionlint.source.values import Value

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


class Recipe(Struct):
    """How the programs of a file train, as far as it was seen.

    ``halves``: weights that took fp16 or bf16; ``stepped``: those of each optimizer, None where they are unknown;
    ``copies``: those of copied models, which are there to be averaged or saved.
    """

    regions: set[str] = field(default_factory=set)
    scaler: bool = False
    optimizers: set[str] = field(default_factory=set)
    halves: set[tuple[str, Weights]] = field(default_factory=set)
    stepped: set[Weights | None] = field(default_factory=set)
    copies: Weights = frozenset()
    clips: set[str] = field(default_factory=set)

    def note(self, event: Event) -> None:
        """Keeps what an event tells of the weights' dtypes and of who steps them."""
        if isinstance(event, WeightsTake):
            if event.dtype in HALF:
                self.halves.add((HALF[event.dtype], event.weights))
        elif isinstance(event, Owns):
            self.stepped.add(event.weights)
        elif isinstance(event, Copied):
            self.copies |= event.copy
            self.halves |= {(dtype, event.copy) for dtype, held in self.halves if overlap(held, event.weights)}
        elif isinstance(event, Adopted):
            self.halves = {(dtype, moved(held, event)) for dtype, held in self.halves}
            self.copies = moved(self.copies, event)
            self.stepped = {moved(held, event) if held is not None else None for held in self.stepped}

    def text(self) -> str:
        """In one line: ``fp16 autocast + GradScaler, AdamW on fp32 weights, clip 1.0``; empty where nothing trains."""
        if not self.optimizers:
            return ""
        forward = [f"{'/'.join(sorted(self.regions))} autocast"] if self.regions else []
        forward += ["GradScaler"] if self.scaler else []
        weights = "/".join(sorted({dtype for dtype, held in self.halves if self._steps(held)})) or "fp32"
        parts = [" + ".join(forward) or "no autocast", f"{'/'.join(sorted(self.optimizers))} on {weights} weights"]
        parts += [f"clip {'/'.join(sorted(self.clips))}"] if self.clips else []
        return ", ".join(parts)

    def _steps(self, weights: Weights) -> bool:
        """Whether an optimizer steps any of these weights, as far as it was seen; one that takes unknown ones takes no copies."""
        known = any(overlap(weights, own) is not False for own in self.stepped if own is not None)
        return known or (None in self.stepped and not covers(self.copies, weights))


class Coverage(Struct):
    """What reading came across."""

    programs: int = 0
    loops: set[Any] = field(default_factory=set)
    optimizers: set[Any] = field(default_factory=set)
    scalers: set[Any] = field(default_factory=set)
    recipe: Recipe = field(default_factory=lambda: Recipe())
    gave_up: dict[tuple[Any, Any], str] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    """The names of assumptions that some undecided value has."""


class BudgetError(Exception):
    """More paths than reading can follow: of a program (``call`` is None), or of one call in it."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.call = call
