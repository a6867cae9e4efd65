"""The fp32 policy table: what precision each family of ops needs, and in what torch adds up on which device.

``rules/policy.toml`` holds it; ``[tool.precisionlint.policy]`` of a pyproject.toml overrides requirements, for a
family or an op and below a module's path. It knows names of ops and dtypes as text, and no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from precisionlint import catalogue
from precisionlint.config import Configuration
from precisionlint.dataclass import dataclass

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


class PolicyError(ValueError):
    """A policy table that cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Requirement:
    """The least precision of each of the three, as a dtype's name; empty where nothing is asked."""

    input: str = ""
    accumulation: str = ""
    output: str = ""


@dataclass(frozen=True)
class Family:
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


@dataclass(frozen=True)
class Override:
    """A project's own requirement: for a family or an op, below modules whose path fits the pattern."""

    target: str
    module: str
    requires: Mapping[str, str]


@dataclass(frozen=True)
class Policy:
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

    Raises PolicyError where those are wrong, config.ConfigError where the settings are.
    """
    policy = load()
    settings = Configuration().of_folder(start.resolve())
    if settings.source is None or not settings.policy:
        return policy
    text, _ = _read(settings.source)
    return Policy(policy.families, tuple(_overrides(settings.source, text, settings.policy, policy)))


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


def _overrides(path: Path, text: str, section: Mapping[str, Any], policy: Policy) -> Iterable[Override]:
    names = {family.name for family in policy.families}
    for key, value in section.items():
        if not isinstance(value, dict):
            raise _wrong(path, text, key, 'is no table such as { accumulation = "float32" }', key)
        if all(not isinstance(each, dict) for each in value.values()):
            if "." in key or ("*" in key and key not in names):
                raise _wrong(
                    path,
                    text,
                    key,
                    'is a module\'s path: give it families or ops, such as { softmax = { input = "float32" } }',
                    key,
                )
            yield Override(key, "", _requires(path, text, key, value))
        else:
            for target, requires in value.items():
                if not isinstance(requires, dict):
                    raise _wrong(
                        path, text, key, f"'{target}' is no table such as {{ accumulation = \"float32\" }}", target
                    )
                yield Override(target, key, _requires(path, text, f"{key}.{target}", requires))


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
    """An error with the line of the word that is wrong, looked for from its table's heading on."""
    lines = text.splitlines()
    last = name.rpartition(".")[2]
    first = next(
        (number for number, line in enumerate(lines) if re.search(rf"(?<![\w-]){re.escape(last)}(?![\w-])", line)), 0
    )
    number = next((number for number in range(first, len(lines)) if not word or word in lines[number]), first)
    return PolicyError(f"{path}:{number + 1}: policy: '{name}' {what}")


def _below(module: str, pattern: str) -> bool:
    """Whether a module lies at or below a path, whose parts may be patterns."""
    if not pattern:
        return True
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(fnmatchcase(part, each) for part, each in zip(parts, wanted, strict=False))
