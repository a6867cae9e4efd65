"""What tells dictionaries of one origin apart, without comparing all that they share."""

from __future__ import annotations

from itertools import compress, islice
from operator import is_, is_not
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def differing(dicts: list[dict[K, V]]) -> list[K]:
    """The keys that not all of the dictionaries have with the very same value."""
    first, *others = dicts
    found: dict[K, None] = {}
    for other in others:
        if other is first:
            continue
        # Paths of one origin hold what they share in the same order: most of it is told apart without looking anything up.
        shared = list(map(is_, first, other))
        alike = shared.index(False) if False in shared else len(shared)
        for key in compress(islice(first, alike), map(is_not, first.values(), other.values())):
            found[key] = None
        for key in islice(first, alike, None):
            if key not in other or other[key] is not first[key]:
                found[key] = None
        for key in islice(other, alike, None):
            if key not in first:
                found[key] = None
    return list(found)
