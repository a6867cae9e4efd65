"""On which decisions a hit hangs, beside those of the branches that its stations stand in.

``if args.unscale: scaler.unscale_(optimizer)`` leaves a path on which nothing was unscaled, and a clip below it stands
in no branch: that path has decided ``not args.unscale``. Where paths are so many that decisions are forgotten (see
``blur.py``), what is forgotten is not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from precisionlint.checks import Hit
from precisionlint.source.interpret import WAYS, Interpreter
from precisionlint.source.operators import as_cond
from precisionlint.source.state import Fact
from precisionlint.source.values import Cond, Sym


def hangs_on(it: Interpreter, key: Any, hit: Hit) -> tuple[tuple[str, ...], ...]:
    """What each way to a hit has decided at branches that none of its stations stands in; none where a way has decided
    nothing there.
    """
    around = {cond.sym for seen in hit.trace for label in seen.when for cond in it.labelled.get(label, ())}
    for sym in list(around):
        around.update(sides_of(sym))
    ways = [[each for each in way.items() if each[0] not in around] for way in it.decided[key][: WAYS - 1]]
    if not all(ways):
        return ()
    words = {cond: label for label, conds in it.labelled.items() for cond in conds}
    return tuple(dict.fromkeys(tuple(said(sym, fact, words) for sym, fact in way) for way in ways))


def sides_of(sym: Sym) -> Iterator[Sym]:
    """What an 'and' or an 'or' asks about, however deep."""
    if sym.key[0] == "op" and sym.key[1] in ("and", "or"):
        for side in sym.key[2:4]:
            cond = as_cond(side)
            if cond is not None:
                yield cond.sym
                yield from sides_of(cond.sym)


def said(sym: Sym, fact: Fact, words: Mapping[Cond, str]) -> str:
    """What is decided about a symbol, in the words of a branch that asks for it, or in our own."""
    decided = [Cond(sym, "eq", fact.eq, True)] if fact.eq is not None else []
    decided += [Cond(sym, "truth", None, fact.truth)] if fact.truth is not None else []
    decided += [Cond(sym, "none", None, fact.none)] if fact.none is not None else []
    decided += [Cond(sym, "eq", each, False) for each in sorted(fact.ne, key=str)]
    return next((words[each] for each in decided if each in words), decided[0].text)
