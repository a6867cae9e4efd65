"""The fp32 policy table: what precision each family of ops needs, and in what torch adds up on which device.

``rules/policy.toml`` holds it; ``[tool.precisionlint.policy]`` of a pyproject.toml overrides requirements, for a
family or an op and below a module's path. It knows names of ops and dtypes as text, and no torch.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from precisionlint import catalogue
from precisionlint.config import Configuration
from precisionlint.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIELDS = ("input", "accumulation", "output")
RANKS = {
    "float4_e2m1fn_x2": 0,
    "float8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2fnuz": 1,
    "float8_e4m3fnuz": 1,
    "float8_e8m0fnu": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 5,
    "complex64": 4,
    "complex128": 5,
}
"""Floating dtypes by precision; what is not among them is not judged."""
STORAGE = "storage"
UNKNOWN = "unknown"


class PolicyError(InputError):
    """A policy table that cannot be used; the message names the file, the line and what is wrong."""


class Requirement(Struct, frozen=True):
    """The least precision of each of the three, as a dtype's name; empty where nothing is asked."""

    input: str = ""
    accumulation: str = ""
    output: str = ""


class Family(Struct, frozen=True):
    """One kind of op: which ops, what they need and why, and what torch adds up in."""

    name: str
    ops: tuple[str, ...]
    phases: tuple[str, ...]
    requires: Requirement
    accumulates: Mapping[str, str]
    reduced: Mapping[str, str]
    why: str
    source: str
    differs: str


class Override(Struct, frozen=True):
    """A project's own requirement: for a family or an op, below modules whose path fits the pattern."""

    target: str
    module: str
    requires: Mapping[str, str]


class Policy(Struct, frozen=True):
    """The table in force."""

    families: tuple[Family, ...]
    overrides: tuple[Override, ...] = field(default=())

    def family(self, op: str, phase: str) -> Family | None:
        """The first family that an op belongs to in a phase of the step."""
        for family in self.families:
            if (not family.phases or phase in family.phases) and any(
                fnmatchcase(op, pattern) for pattern in family.ops
            ):
                return family
        return None

    def knows(self, target: str) -> bool:
        """Whether a name is that of a family, or of an op of one."""
        return any(
            target == family.name or any(fnmatchcase(target, pattern) for pattern in family.ops)
            for family in self.families
        )

    def requirement(self, family: Family, op: str, module: str) -> Requirement:
        """What is required of an op in a module: the family's, then the project's own, the narrower the later."""
        values = {name: getattr(family.requires, name) for name in FIELDS}
        for override in sorted(self.overrides, key=lambda each: (bool(each.module), each.target == op)):
            if override.target in (family.name, op) and _below(module, override.module):
                values.update(override.requires)
        return Requirement(**values)


def accumulation(
    family: Family | None, device: str, inputs: Iterable[str], outputs: Iterable[str], settings: Mapping[str, str]
) -> str:
    """The dtype in which an op adds up: empty where it adds nothing up, ``unknown`` where nobody has looked.

    ``float32, partly bfloat16`` where a setting in force lets partial sums stay in half.
    """
    if family is None or not family.accumulates:
        return ""
    kind = family.accumulates.get(device, UNKNOWN)
    if kind == UNKNOWN:
        return UNKNOWN
    floats = [each for name in inputs for each in name.split("|") if each in RANKS]
    stored = [each for name in outputs for each in name.split("|") if each in RANKS] or floats
    if kind == STORAGE:
        return min(stored, key=RANKS.__getitem__, default="")
    widest = max([kind, *floats], key=RANKS.__getitem__)
    if not floats and not stored:
        return ""
    if device == "cuda":
        for name in floats:
            if settings.get(family.reduced.get(name, ""), "").startswith(("True", "(True")):
                return f"{widest}, partly {name}"
    return widest


def shortfall(requires: Requirement, inputs: Iterable[str], accumulated: str, outputs: Iterable[str]) -> str:
    """What an op lacks, such as ``output bfloat16 where float32 is due``; empty where it lacks nothing."""
    for name, found in (("input", inputs), ("accumulation", [accumulated.partition(",")[0]]), ("output", outputs)):
        due = getattr(requires, name)
        if not due:
            continue
        for each in (part for text in found for part in text.split("|")):
            if each in RANKS and RANKS[each] < RANKS[due]:
                return f"{name} {each} where {due} is due"
    return ""


@cache
def load() -> Policy:
    """The table that comes with the program; raises PolicyError where it is broken."""
    path = catalogue.folder() / "policy.toml"
    text, table = _read(path)
    families = tuple(_family(path, text, name, value) for name, value in table.items())
    return Policy(families)


def of_project(start: Path) -> Policy:
    """The table with the overrides of a project: those of the settings that hold in a folder (see ``config``).

    Raises PolicyError where those are wrong (reading the settings does), config.ConfigError where others are.
    """
    policy = load()
    settings = Configuration().of_folder(start.resolve())
    if settings.source is None or not settings.policy:
        return policy
    text, _ = _read(settings.source)
    return Policy(policy.families, overrides(settings.source, text, settings.policy))


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{path}: {error}") from error


def _family(path: Path, text: str, name: str, value: Any) -> Family:
    known = {"ops", "phases", *FIELDS, "accumulates", "reduced", "why", "source", "differs"}
    if not isinstance(value, dict):
        raise _wrong(path, text, name, "is no table")
    for key in value:
        if key not in known:
            raise _wrong(path, text, name, f"holds the unknown key '{key}'", key)
    for key in ("ops", "why"):
        if not value.get(key):
            raise _wrong(path, text, name, f"lacks '{key}'")
    accumulates = value.get("accumulates", {})
    for device, kind in accumulates.items():
        if kind != STORAGE and kind not in RANKS:
            raise _wrong(
                path, text, name, f"accumulates: '{kind}' on {device} is neither a dtype nor 'storage'", "accumulates"
            )
    return Family(
        name,
        tuple(value["ops"]),
        tuple(value.get("phases", ())),
        Requirement(**_requires(path, text, name, {key: value[key] for key in FIELDS if key in value})),
        accumulates,
        value.get("reduced", {}),
        value["why"],
        value.get("source", ""),
        value.get("differs", ""),
    )


def overrides(path: Path, text: str, section: Mapping[str, Any]) -> tuple[Override, ...]:
    """What a project's section asks for; ``text`` is the file that holds it. Raises PolicyError."""
    return tuple(_overrides(path, text, section, load()))


def _overrides(path: Path, text: str, section: Mapping[str, Any], policy: Policy) -> Iterable[Override]:
    for key, value in section.items():
        if not isinstance(value, dict):
            raise _wrong(path, text, key, 'is no table such as { accumulation = "float32" }', key)
        inner = any(isinstance(each, dict) for each in value.values())
        if not inner and ("." in key or "*" in key) and not policy.knows(key):
            told = 'is a module\'s path: give it families or ops, such as { softmax = { input = "float32" } }'
            raise _wrong(path, text, key, told, key)
        for target, requires in value.items() if inner else [(key, value)]:
            name = f"{key}.{target}" if inner else key
            if not isinstance(requires, dict):
                raise _wrong(
                    path, text, key, f"'{target}' is no table such as {{ accumulation = \"float32\" }}", target
                )
            if not policy.knows(target):
                names = [family.name for family in policy.families]
                near = "".join(f"; did you mean '{each}'?" for each in difflib.get_close_matches(target, names, 1))
                told = f"is neither a family nor an op of the table{near}"
                raise _wrong(path, text, target, told, target)
            yield Override(target, key if inner else "", _requires(path, text, name, requires))


def _requires(path: Path, text: str, name: str, value: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, dtype in value.items():
        if key not in FIELDS:
            raise _wrong(path, text, name, f"may hold {', '.join(FIELDS)}, not '{key}'", key)
        if dtype != "any" and dtype not in RANKS:
            raise _wrong(path, text, name, f"{key} must be a dtype such as float32, or any, not {dtype!r}", str(dtype))
        found[key] = "" if dtype == "any" else dtype
    return found


def _wrong(path: Path, text: str, name: str, what: str, word: str = "") -> PolicyError:
    """An error with the line of the word that is wrong, looked for from its table's heading on, comments aside."""
    lines = ["" if line.lstrip().startswith("#") else line for line in text.splitlines()]
    first = 0
    for part in ("policy", *name.rpartition(".")[::2]):
        first = next((at for at in range(first, len(lines)) if part and _stands(part, lines[at])), first)
    number = next((at for at in range(first, len(lines)) if not word or word in lines[at]), first)
    return PolicyError(f"{path}:{number + 1}: policy: '{name}' {what}")


def _stands(word: str, line: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", line) is not None


def _below(module: str, pattern: str) -> bool:
    """Whether a module lies at or below a path, whose parts may be patterns."""
    if not pattern:
        return True
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(fnmatchcase(part, each) for part, each in zip(parts, wanted, strict=False))
