"""Which versions of torch a project runs with, by what it declares: requirements, lock files, and the Pythons that it supports.

Says nothing where nothing is declared. Several declarations (extras, requirements files) are read as alternatives.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from precisionlint.patterns import regex

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Version = tuple[float, ...]
"""``2.6`` as (2, 6): no zeros at the end, so that 2.6.0 is the same; all of a line's releases end in ``math.inf``."""

LINES = ("requirements*.txt", "requirements/*.txt", "environment*.yml", "environment*.yaml", "setup.py", "setup.cfg")
LOCKS = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml", "Pipfile.lock", "pixi.lock", "conda-lock.yml")
REQUIREMENT = regex(
    r"""^[ \t]*(?:-[ \t]+)?["']?(?:[\w.-]+::)?(?:py)?torch[ \t]*(?:\[[^\]]*\])?[ \t]*\(?(?P<bounds>[<>=!~][^"'\n#;)]*)?["'\s;#)]*(?:[;#].*)?$"""
    r"""|["'](?:py)?torch[ \t]*(?:\[[^\]]*\])?[ \t]*\(?(?P<quoted>[<>=!~][^"'\n#;)]*)""",
    re.M,
)
"""A requirement on a line of its own, as pip and conda have it, or in quotes with bounds, as in a setup.py."""
NAMED = regex(r"torch[ \t]*(?:\[[^\]]*\])?[ \t]*\(?(?P<bounds>[<>=!~][^;)]*)?[ \t]*\)?[ \t]*(?:;.*)?$")
LOCKED = regex(
    r"""name = "torch"\s+version = "([^"]+)"|"torch": \{[^{}]*?"version": "==([^"]+)"|/pytorch-(\d[\w.]*)-|/torch-(\d[\w.]*)[+%-]"""
)
BOUND = regex(r"(?:^|(?<=[\s,]))(===|==|>=|<=|~=|!=|[<>=~^])?\s*v?(\d+(?:\.\d+)*)(\.\*)?")
PYTHON = regex(r"""python_requires\s*=\s*["']?([^"'\n]+)""")

FIRST: dict[Version, Version] = {(3, 11): (1, 13), (3, 12): (2, 2), (3, 13): (2, 5), (3, 14): (2, 9)}
LAST: dict[Version, Version] = {(3, 6): (1, 10, 2), (3, 7): (1, 13, 1), (3, 8): (2, 4, 1), (3, 9): (2, 8)}
"""Python -> the first and the last torch that PyPI has wheels for."""


class Range(Struct, frozen=True):
    """The oldest and the newest torch that a project runs with, both included; None where nothing says so."""

    oldest: Version | None = None
    newest: Version | None = None

    def meets(self, bound: str) -> bool:
        """Whether some version of the range lies within a bound, ``>=2.9`` or ``<2.12``; every one does in the empty bound."""
        if not bound:
            return True
        within = parse(bound)
        below = within.oldest is not None and self.newest is not None and self.newest < within.oldest
        above = within.newest is not None and self.oldest is not None and self.oldest > within.newest
        return not below and not above


def version(text: str) -> Version:
    """``"2.3.0"`` as (2, 3)."""
    parts = [int(part) for part in text.split(".")]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return tuple(parts)


def parse(text: str) -> Range:
    """The range of bounds as pip, poetry or conda write them (``>=2.3,<2.9``, ``~=2.3``, ``^2.1``, ``2.6``); what cannot be read bounds
    nothing. A version alone means its whole line: 2.6 is also 2.6.1."""
    oldest: list[Version] = []
    newest: list[Version] = []
    for operator, number, wild in BOUND.findall(text):
        at = version(number)
        length = number.count(".") + 1
        if operator in (">=", ">"):
            oldest.append(at)
        elif operator == "<=":
            newest.append(at)
        elif operator == "<":
            newest.append(before(at))
        elif operator != "!=":
            oldest.append(at)
            exact = operator in ("==", "===") and not wild and length > 2
            kept = {"^": 1, "~=": length - 1, "~": min(length, 2)}.get(operator, length)
            newest.append(at if exact else (*map(int, number.split(".")[:kept]), math.inf))
    return Range(max(oldest, default=None), min(newest, default=None))


def before(at: Version) -> Version:
    """The end of what lies before a version: 2.8.* before 2.9."""
    return (*at[:-1], at[-1] - 1, math.inf)


def shown(at: Version) -> str:
    """A version as people write it."""
    return ".".join("*" if part == math.inf else str(part) for part in at) + (".0" if len(at) == 1 else "")


def versions(root: Path) -> Range:
    """The torch versions that the files of a project's root allow: from the lowest lower bound of its requirements up to what its lock
    file holds, or else the highest upper bound if each has one, within what the Pythons that it supports have wheels of."""
    declared: list[Range] = []
    pythons: list[Range] = []
    for text in texts(root, ("pyproject.toml",)):
        requirements, supported = project(text)
        declared += [parse(each) for each in requirements]
        pythons += [parse(each) for each in supported]
    for text in texts(root, LINES):
        declared += [parse(match["bounds"] or match["quoted"] or "") for match in REQUIREMENT.finditer(text)]
        pythons += [parse(each) for each in PYTHON.findall(text)]
    locked = [
        version(number[0])
        for text in texts(root, LOCKS)
        for match in LOCKED.finditer(text)
        if (number := re.match(r"\d+(?:\.\d+)*", next(filter(None, match.groups()))))
    ]
    oldest = min((each.oldest for each in declared if each.oldest is not None), default=None)
    uppers = [each.newest for each in declared]
    newest = max((each for each in uppers if each is not None), default=None) if None not in uppers else None
    locked = [each for each in locked if oldest is None or each >= oldest]  # a lock file below is an old one
    if locked:
        oldest, newest = min(locked) if oldest is None else oldest, max(locked)
    for python in pythons:
        floor = max((last for first, last in FIRST.items() if python.oldest and first <= python.oldest), default=None)
        ceiling = min(
            (last for at, last in LAST.items() if python.newest and python.newest < (*at, math.inf, 1)), default=None
        )
        oldest = max(oldest, floor) if oldest is not None and floor is not None else oldest
        newest = min(each for each in (newest, ceiling) if each is not None) if newest or ceiling else None
    return Range(oldest, newest)


def texts(root: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    """The texts of the files of these names."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            with contextlib.suppress(OSError):
                yield path.read_text(encoding="utf-8", errors="replace")


def project(text: str) -> tuple[list[str], list[str]]:
    """What a pyproject.toml says of torch and of Python, each time that it does: bounds, empty where it names torch without any."""
    try:
        table: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return [], []
    own = section(table, "project")
    poetry = section(table, "tool", "poetry")
    held = [own.get("dependencies"), *section(own, "optional-dependencies").values()]
    held += section(table, "dependency-groups").values()
    found = [
        match["bounds"] or ""
        for group in held
        if isinstance(group, list)
        for each in group
        if isinstance(each, str) and (match := NAMED.match(each.strip()))
    ]
    groups = [section(poetry, "dependencies"), section(poetry, "dev-dependencies")]
    groups += [section(each, "dependencies") for each in section(poetry, "group").values() if isinstance(each, dict)]
    groups += [section(table, "tool", "pixi", "dependencies"), section(table, "tool", "pixi", "pypi-dependencies")]
    for each in groups:
        for name in ("torch", "pytorch"):
            if name in each:
                given = (
                    each[name]["version"] if isinstance(each[name], dict) and "version" in each[name] else each[name]
                )
                found.append(given if isinstance(given, str) else "")
    python = [own.get("requires-python"), section(poetry, "dependencies").get("python")]
    return found, [each for each in python if isinstance(each, str)]


def section(table: Any, *names: str) -> dict[str, Any]:
    """A table inside another, empty where there is none."""
    for name in names:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}
