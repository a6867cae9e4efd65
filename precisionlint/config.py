"""A project's settings: ``[tool.precisionlint]`` of the nearest pyproject.toml, or a precisionlint.toml, and what overrides them.

The settings of a file are those found from its folder upwards; a pyproject.toml without the section is passed over. What a
setting means for rules, folders or policies is decided elsewhere: here a name of a rule is a word.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, field
from msgspec.structs import fields, replace

from precisionlint import catalogue, gitignore
from precisionlint.errors import InputError
from precisionlint.findings import CONFIDENCES, SEVERITIES, Confidence, Finding, Severity
from precisionlint.patterns import regex

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTION = "tool.precisionlint"
OWN_FILE = "precisionlint.toml"
DEVICES = ("cuda", "rocm", "cpu", "mps", "xpu")
VERSIONS = regex(r"\d+(\.\d+)*|(?:(?:>=|<=|==|<|>|~=)\s*\d+(\.\d+)*\s*(?:,\s*|$))+")
EXCLUDE = ("build/", "dist/", "node_modules/", "site-packages/", "__pycache__/", "*.egg-info/")
"""Folders of what others wrote or a tool made."""


def wrong_version(text: object) -> str:
    """What a text ought to be that is no version of torch and no bounds that some version lies within; empty where it is."""
    if not isinstance(text, str) or VERSIONS.fullmatch(text.strip()) is None:
        return f'must be a version such as "2.6" or bounds such as ">=2.4,<2.9", not {_toml(text)}'
    from precisionlint.source.requirements import parse

    within = parse(text)
    empty = within.oldest is not None and within.newest is not None and within.oldest > within.newest
    return f"must have bounds that some version lies within, not {_toml(text)}" if empty else ""


def wrong_pattern(pattern: str) -> str:
    """Why a text is no pattern of a .gitignore; empty where it is."""
    if gitignore.parse(pattern).runs:
        return ""
    why = "it is a comment" if pattern.startswith("#") else "a [ is not closed, or holds a class such as [:alpha:]"
    return f"{_toml(pattern)} is no pattern: {why if pattern.startswith('#') or '[' in pattern else 'it is empty'}"


class ConfigError(InputError):
    """A configuration that cannot be used; the text is one line that names the file, the line and what is wrong."""


class Settings(Struct, frozen=True, dict=True):
    """What a run does with a file. ``base`` is the folder from which its patterns and paths count."""

    base: Path = Path()
    source: Path | None = None
    select: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    severity: Mapping[str, Severity] = field(default_factory=dict)
    min_confidence: Confidence | None = None
    require_reason: bool = False
    exclude: tuple[str, ...] = EXCLUDE
    extend_exclude: tuple[str, ...] = ()
    force_exclude: bool = False
    assume: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    torch_version: str = ""
    frameworks: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""
    cache_dir: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def rules(self) -> frozenset[str]:
        """The names of the rules to look for. Raises catalogue.UnknownNameError."""
        more = ("ignore-without-reason",) if self.require_reason else ()
        return catalogue.select(self.select, (*self.extend_select, *more), self.ignore)

    @cached_property
    def _excluded(self) -> gitignore.Patterns:
        return gitignore.parse("\n".join((*self.exclude, *self.extend_exclude)))

    @cached_property
    def _ignored(self) -> tuple[tuple[gitignore.Patterns, frozenset[str]], ...]:
        return tuple(
            (gitignore.parse(pattern), catalogue.select(names))
            for pattern, names in self.per_file_ignores.items()
            if names
        )

    @cached_property
    def _severities(self) -> Mapping[str, Severity]:
        """Rule -> severity; a rule's own name speaks over its family's, and that over ``all``."""
        found: dict[str, Severity] = {}
        widest_first = sorted(self.severity.items(), key=lambda item: len(catalogue.select([item[0]])), reverse=True)
        for word, severity in widest_first:
            found.update(dict.fromkeys(catalogue.select([word]), severity))
        return found

    def excludes(self, path: str) -> bool:
        """Whether a walk leaves out a path (absolute, a folder's ends in ``/``)."""
        return bool(self._excluded.verdict(self._below(path)))

    def ignores(self, path: str) -> frozenset[str]:
        """The rules that are not looked for in a file."""
        below = self._below(path)
        return frozenset().union(*(names for patterns, names in self._ignored if patterns.verdict(below)))

    def severity_of(self, finding: Finding) -> Severity:
        """The severity that the project gives a finding's rule, where it gives one; what is only possible is never more than info."""
        given = self._severities.get(finding.rule) if finding.confidence != "possible" else None
        return given or finding.severity

    @property
    def least(self) -> Confidence:
        """The least that a finding must be. What is only possible is shown to who asks for it, or selects ``all``."""
        everything = "all" in (*self.select, *self.extend_select)
        return self.min_confidence or ("possible" if everything else "likely")

    def shows(self, finding: Finding) -> bool:
        """Whether a finding is sure enough."""
        return CONFIDENCES.index(finding.confidence) <= CONFIDENCES.index(self.least)

    def _below(self, path: str) -> str:
        base = self.base.as_posix().rstrip("/") + "/"
        return path.removeprefix(base) if path.startswith(base) else path.lstrip("/")


class Configuration:
    """The settings of every file of a run: the project's own, or those of one file given, then what the command line says.

    ``overrides`` hold those fields of ``Settings`` that were given; a ``select`` among them replaces all that the project says about rules.
    Raises ConfigError, at once for the file given, else when settings are asked for.
    """

    def __init__(
        self, overrides: Mapping[str, Any] | None = None, *, path: str | None = None, isolated: bool = False
    ) -> None:
        self._overrides = dict(overrides or {})
        self._by_folder: dict[Path, Settings] = {}
        self._by_name: dict[str, Settings] = {}
        self._fixed: Settings | None = None
        if path is not None:
            self._fixed = self._overridden(read(Path(path).resolve()) or Settings(Path(path).resolve().parent))
        elif isolated:
            self._fixed = self._overridden(Settings(Path.cwd()))

    def of_folder(self, folder: Path) -> Settings:
        """The settings of the files in a folder (absolute)."""
        if self._fixed is not None:
            return self._fixed
        asked: list[Path] = []
        settings: Settings | None = None
        for one in (folder, *folder.parents):
            settings = self._by_folder.get(one)
            if settings is not None:
                break
            asked.append(one)
            found = _in_folder(one)
            if found is not None:
                settings = self._overridden(found)
                break
        if settings is None:
            settings = self._overridden(Settings(Path.cwd()))
        self._by_folder.update(dict.fromkeys(asked, settings))
        return settings

    def of(self, path: Path) -> Settings:
        """The settings of a file."""
        folder = os.path.dirname(path)
        if folder not in self._by_name:
            self._by_name[folder] = self.of_folder(Path(folder).resolve())
        return self._by_name[folder]

    def _overridden(self, settings: Settings) -> Settings:
        values = dict(self._overrides)
        if values.get("select"):
            settings = replace(settings, select=(), extend_select=(), ignore=())
        for name in ("extend_select", "ignore", "extend_exclude"):
            if name in values:
                values[name] = (*getattr(settings, name), *values[name])
        for name in ("assume", "severity", "per_file_ignores", "frameworks"):
            if name in values:
                values[name] = {**getattr(settings, name), **values[name]}
        settings = replace(settings, **values)
        for name in ("exclude", "extend_exclude", "per_file_ignores"):
            for fault in filter(None, map(wrong_pattern, self._overrides.get(name, ()))):
                raise ConfigError(f"{name.replace('_', '-')}: {fault}")
        if settings.torch_version and (fault := wrong_version(settings.torch_version)):
            raise ConfigError(f"torch-version {fault}")
        for each in (settings.rules, settings._ignored, settings._severities):
            del each  # an unknown name is told before anything is read
        return settings


def _in_folder(folder: Path) -> Settings | None:
    for name in (OWN_FILE, "pyproject.toml"):
        path = folder / name
        if name == OWN_FILE and os.path.islink(path) and not os.path.exists(path):
            raise ConfigError(f"{path}: a link to nothing: mend or remove it, or pass --isolated")
        if os.path.isfile(path):  # `Path.is_file` raises where the folder may not be entered
            found = read(path)
            if found is not None:
                return found
    return None


def section(path: Path) -> tuple[str, Any]:
    """The text of a configuration file, and its table for this program: None where a pyproject.toml has none.

    Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if path.name != "pyproject.toml":
        return text, table.get("tool", {}).get("precisionlint", table) if isinstance(table.get("tool"), dict) else table
    tools = table.get("tool", {})
    return text, tools.get("precisionlint") if isinstance(tools, dict) else None


def read(path: Path) -> Settings | None:
    """The settings that a file holds; None where it is a pyproject.toml without the section. Raises ConfigError."""
    text, table = section(path)
    if table is None:
        return None
    reader = _Reader(path, text)
    if not isinstance(table, dict):
        raise reader.wrong("precisionlint", f"{SECTION} must be a table, [{SECTION}], not {_toml(table)}")
    values = {}
    for key, value in table.items():
        if key not in KEYS:
            raise reader.wrong(key, f"unknown key '{key}'{_nearest(key, KEYS)}")
        values[key.replace("-", "_")] = KEYS[key](reader, key, value)
    settings = Settings(base=path.parent, source=path, **values)
    try:
        for each in (settings.rules, settings._ignored, settings._severities):
            del each
    except catalogue.UnknownNameError as error:
        word = re.search(r"'([^']*)'", str(error))
        raise reader.wrong(word[1] if word else "", str(error)) from error
    return settings


def shown(settings: Settings) -> list[str]:
    """The settings as the TOML that would give them, and where they come from."""
    lines = [f"# from {settings.source}" if settings.source else "# no configuration file: these are the defaults"]
    tables: list[str] = []
    for key in (each.name for each in fields(settings) if each.name not in ("base", "source")):
        name, value = key.replace("_", "-"), getattr(settings, key)
        if isinstance(value, Mapping):
            if value:
                tables += ["", f"[{name}]", *(f"{_toml(each)} = {_toml(value[each])}" for each in value)]
        elif key == "min_confidence":  # which depends on what is selected, where nobody gave it
            lines.append(f"{name} = {_toml(settings.least)}")
        elif value not in ("", None):  # what nobody gave
            lines.append(f"{name} = {_toml(value)}")
    return lines + tables


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        import json

        return json.dumps(value)
    return str(value)


def _nearest(word: str, known: Iterable[str]) -> str:
    return _near(word, known) or f"; known are {', '.join(known)}"


def _near(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


class _Reader(Struct, frozen=True):
    """Values of a configuration file as the types that they must have."""

    path: Path
    text: str

    def wrong(self, word: str, what: str) -> ConfigError:
        """An error with the line on which a key or word stands."""
        pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
        lines = self.text.splitlines()
        heading = re.compile(rf"\s*\[{re.escape(SECTION)}[\].]")
        start = next((number for number, line in enumerate(lines) if heading.match(line)), 0)
        numbers = (number for number in range(start, len(lines)) if word and pattern.search(lines[number]))
        number = next(numbers, None)
        where = self.path if number is None else f"{self.path}:{number + 1}"
        return ConfigError(f"{where}: {what}")

    def words(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(
                key, f'{key} must be a list of words such as ["{EXAMPLES.get(key, "a")}"], not {_toml(value)}'
            )
        return tuple(value)

    def patterns(self, key: str, value: Any) -> tuple[str, ...]:
        for pattern in (patterns := self.words(key, value)):
            if fault := wrong_pattern(pattern):
                raise self.wrong(pattern or key, f"{key}: {fault}")
        return patterns

    def flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.wrong(key, f"{key} must be true or false, not {_toml(value)}")
        return value

    def word(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, f"{key} must be a text, not {_toml(value)}")
        return value

    def one_of(self, known: Sequence[str], key: str, value: Any) -> str:
        if value not in known:
            near = _near(value, known) if isinstance(value, str) else ""
            raise self.wrong(key, f"{key} must be one of {', '.join(known)}, not {_toml(value)}{near}")
        return cast(str, value)

    def device(self, key: str, value: Any) -> str:
        return self.one_of(DEVICES, key, value)

    def confidence(self, key: str, value: Any) -> str:
        return self.one_of(CONFIDENCES, key, value)

    def torch(self, key: str, value: Any) -> str:
        if fault := wrong_version(value):
            raise self.wrong(key, f"{key} {fault}")
        return cast(str, value)

    def contracts(self, key: str, value: Any) -> Mapping[str, str]:
        from precisionlint.source.apis import table

        known = table().known() if value else []
        for name, acts in self.table(key, value).items():
            if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
                said = f'{key}: {_toml(name)} must be the full name of a class or function in quotes, such as "mylab.engine.Engine"'
                raise self.wrong(name, said)
            if not isinstance(acts, str) or table().canonical(acts) not in known:
                near = _near(acts, known) if isinstance(acts, str) else ""
                said = (
                    f"{key}: {name} must act as a class or function of rules/frameworks.toml, not {_toml(acts)}{near}"
                )
                raise self.wrong(name, said)
        return dict(value)

    def table(self, key: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, f"{key} must be a table, not {_toml(value)}")
        return value

    def policy(self, key: str, value: Any) -> Mapping[str, Any]:
        """Only looked through here: who measures makes something of it."""
        table = self.table(key, value)
        if table:
            from precisionlint.policy import overrides

            overrides(self.path, self.text, table)
        return table

    def lists(self, key: str, value: Any) -> Mapping[str, tuple[str, ...]]:
        self.patterns(key, list(self.table(key, value)))
        return {
            pattern: self.words(pattern, names if isinstance(names, list) else [names])
            for pattern, names in value.items()
        }

    def severities(self, key: str, value: Any) -> Mapping[str, Severity]:
        for rule, severity in self.table(key, value).items():
            if severity not in SEVERITIES:
                near = _near(severity, SEVERITIES) if isinstance(severity, str) else ""
                said = f"the severity of {rule} must be one of {', '.join(SEVERITIES)}, not {_toml(severity)}{near}"
                raise self.wrong(rule, said)
        return dict(value)

    def assumptions(self, key: str, value: Any) -> Mapping[str, str]:
        for name, each in self.table(key, value).items():
            if not isinstance(each, (str, bool, int, float)):
                raise self.wrong(name, f"assume: {name} must be a text, a number, true or false, not {_toml(each)}")
        return {name: str(each) for name, each in value.items()}


EXAMPLES = {
    "select": "loss-scaling",
    "extend-select": "scale-read-on-host",
    "ignore": "tf32-off",
    "exclude": "third_party/",
    "extend-exclude": "third_party/",
}
KEYS: Mapping[str, Callable[[_Reader, str, Any], Any]] = {
    "select": _Reader.words,
    "extend-select": _Reader.words,
    "ignore": _Reader.words,
    "per-file-ignores": _Reader.lists,
    "severity": _Reader.severities,
    "min-confidence": _Reader.confidence,
    "require-reason": _Reader.flag,
    "exclude": _Reader.patterns,
    "extend-exclude": _Reader.patterns,
    "force-exclude": _Reader.flag,
    "assume": _Reader.assumptions,
    "device": _Reader.device,
    "torch-version": _Reader.torch,
    "frameworks": _Reader.contracts,
    "baseline": _Reader.word,
    "cache-dir": _Reader.word,
    "policy": _Reader.policy,
}
"""The keys of a configuration and the form of their values."""
