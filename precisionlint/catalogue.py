"""Reads the rule catalogue in `rules/`: what each rule is called, how grave it is, and its page.

It knows pages and names, not checks. A page is `rules/<family>/<name>.md`: TOML front matter between two lines `+++`,
then Markdown, whose fenced `python wrong`, `python right` (or `yaml`, `json`, `sh`) and `python experiment` blocks are run as tests. Loading
parses the front matter alone; bodies are parsed when somebody asks for one.

`python -m precisionlint.catalogue --write-index` renews `rules/README.md`.
"""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from msgspec import Struct

from precisionlint import plugins
from precisionlint.errors import InputError
from precisionlint.findings import SEVERITIES, Severity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FoundBy = Literal["check", "audit", "verify"]
Fix = Literal["none", "safe", "unsafe"]

SUFFIXES = {"python": ".py", "yaml": ".yaml", "json": ".json", "sh": ".sh"}
"""What examples are written in: the word after the fence, and how such a file's name ends."""

ALL = "all"
"""The word that selects every rule."""


class CatalogueError(InputError):
    """A page or the whole catalogue is not as it must be; the text is one line that says where and what."""


class UnknownNameError(InputError):
    """Somebody asked for a rule or family that is not there; the text names the nearest one that is."""


class Rule(Struct, frozen=True):
    """A rule as its page's front matter states it."""

    name: str
    family: str
    summary: str
    severity: Severity
    found_by: tuple[FoundBy, ...]
    fix: Fix
    on_by_default: bool
    aliases: tuple[str, ...]
    page: Path


class Example(Struct, frozen=True):
    """A fenced program or configuration of a page; `line` is that of its first line in the page.

    `measured`: it is wrong in a way that only the audit finds, though `check` finds the rule elsewhere.
    """

    kind: Literal["wrong", "right"]
    code: str
    line: int
    language: str = "python"
    measured: bool = False

    @property
    def suffix(self) -> str:
        """What the name of such a file ends in."""
        return SUFFIXES[self.language]

    @property
    def marks(self) -> tuple[tuple[int, str], ...]:
        """The findings that the program must give: (line of the program, rule), from its `# <- rule, rule` comments."""
        return tuple(
            (number, name.strip())
            for number, text in enumerate(self.code.splitlines(), 1)
            for name in text.partition("# <- ")[2].split(",")
            if name.strip()
        )


class Experiment(Struct, frozen=True):
    """A fenced program that measures what a page claims, and the output that stands under it."""

    code: str
    output: str
    line: int


class _Fence(Struct, frozen=True):
    info: str
    text: str
    line: int


def folder() -> Path:
    """Where the catalogue lies: inside the package when installed, one folder up in a checkout."""
    package = Path(__file__).parent
    for candidate in (package / "rules", package.parent / "rules"):
        if candidate.is_dir():
            return candidate
    raise CatalogueError(f"{package}: no rule catalogue in it and none beside it; is the installation whole?")


@cache
def load(root: Path | None = None) -> Mapping[str, Rule]:
    """Every rule by name, in the order of families and names: the program's own and those of plugins, or those of the catalogue
    `root` alone."""
    folders = [folder(), *(plugin.pages for plugin in plugins.installed())] if root is None else [root]
    pages = sorted(
        (page for each in folders for page in each.glob("*/*.md")), key=lambda page: (page.parent.name, page.stem)
    )
    if not pages:
        raise CatalogueError(f"{root or folder()}: the catalogue holds no page")
    rules: dict[str, Rule] = {}
    owner: dict[str, Path] = {ALL: pages[0].parent.parent} | {page.parent.name: page.parent for page in pages}
    for page in pages:
        rule = _rule(page)
        for name in (rule.name, *rule.aliases):
            if name in owner:
                raise CatalogueError(f"{page}: the name '{name}' is taken by {owner[name]}")
            owner[name] = page
        rules[rule.name] = rule
    return MappingProxyType(rules)


def families(rules: Mapping[str, Rule] | None = None) -> Mapping[str, tuple[Rule, ...]]:
    """The rules of each family."""
    found: dict[str, tuple[Rule, ...]] = {}
    for rule in (load() if rules is None else rules).values():
        found[rule.family] = (*found.get(rule.family, ()), rule)
    return found


def find(name: str, rules: Mapping[str, Rule] | None = None) -> Rule:
    """The rule of that name or alias; raises UnknownNameError."""
    rules = load() if rules is None else rules
    for rule in rules.values():
        if name == rule.name or name in rule.aliases:
            return rule
    raise UnknownNameError(f"no rule is called '{name}'{_nearest(name, _names(rules.values()))}")


def select(
    select: Collection[str] = (),
    extend_select: Collection[str] = (),
    ignore: Collection[str] = (),
    rules: Mapping[str, Rule] | None = None,
) -> frozenset[str]:
    """The names of the rules that a run looks for.

    Each word is a rule's name, an alias, a family or `all`. `select` replaces the default set, `extend_select` adds,
    `ignore` removes. The narrower word wins (a rule's name over its family's, a family's over `all`); between equally
    narrow ones `ignore` does. Raises UnknownNameError.
    """
    rules = load() if rules is None else rules
    chosen = {_canonical(word, rules) for word in (*select, *extend_select)}
    ignored = {_canonical(word, rules) for word in ignore}

    def wanted(rule: Rule) -> bool:
        for word in (rule.name, rule.family, ALL):
            if word in ignored:
                return False
            if word in chosen:
                return True
        return not select and rule.on_by_default

    return frozenset(rule.name for rule in rules.values() if wanted(rule))


def body(rule: Rule) -> str:
    """The page's Markdown, without its front matter."""
    return _split(rule.page)[1]


def examples(rule: Rule) -> tuple[Example, ...]:
    """The page's wrong and right programs, in its order."""
    found = []
    for fence in _fences(rule.page):
        language, _, kind = fence.info.partition(" ")
        if language in SUFFIXES and kind in ("wrong", "right", "wrong measured"):
            wrong: Literal["wrong", "right"] = "right" if kind == "right" else "wrong"
            found.append(Example(wrong, fence.text, fence.line, language, kind == "wrong measured"))
    return tuple(found)


def experiment(rule: Rule) -> Experiment | None:
    """The page's experiment with its printed output; raises CatalogueError where the output does not follow."""
    fences = list(_fences(rule.page))
    found = [index for index, fence in enumerate(fences) if fence.info == "python experiment"]
    if not found:
        return None
    if len(found) > 1:
        raise CatalogueError(f"{rule.page}: {len(found)} experiments, where a page has one")
    program, *after = fences[found[0] :]
    if not after or after[0].info != "text":
        raise CatalogueError(f"{rule.page}: the experiment's output, a ```text block, does not follow it")
    return Experiment(program.text, after[0].text, program.line)


def index(rules: Mapping[str, Rule] | None = None) -> str:
    """The text of `rules/README.md`."""
    rules = load(folder()) if rules is None else rules
    lines = [
        "# Rules",
        "",
        "Written by `python -m precisionlint.catalogue --write-index`; change the pages, not this file.",
    ]
    for family, members in families(rules).items():
        lines += ["", f"## {family}", "", "| rule | what it finds | severity | found by | fix |"]
        lines.append("| --- | --- | --- | --- | --- |")
        lines += [_row(rule) for rule in members]
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    cells = (
        f"[{rule.name}]({rule.family}/{rule.name}.md)",
        rule.summary.replace("|", "\\|"),
        rule.severity if rule.on_by_default else f"{rule.severity}, off by default",
        ", ".join(rule.found_by),
        rule.fix,
    )
    return f"| {' | '.join(cells)} |"


def _names(rules: Iterable[Rule]) -> tuple[str, ...]:
    return tuple(name for rule in rules for name in (rule.name, *rule.aliases))


def _canonical(word: str, rules: Mapping[str, Rule]) -> str:
    if word == ALL or word in rules or any(word == rule.family for rule in rules.values()):
        return word
    for rule in rules.values():
        if word in rule.aliases:
            return rule.name
    known = (ALL, *families(rules), *_names(rules.values()))
    raise UnknownNameError(f"no rule or family is called '{word}'{_nearest(word, known)}")


def _nearest(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else "; `precisionlint rules` lists them"


def _split(page: Path) -> tuple[str, str]:
    """A page's front matter and body; the newlines keep their number, so that lines can be counted."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{page}: {error}") from error
    opening, _, rest = text.partition("\n")
    front, closing, markdown = rest.partition("\n+++\n")
    if opening.rstrip() != "+++" or not closing:
        raise CatalogueError(f"{page}: does not begin with front matter between two lines +++")
    return front, markdown


def _rule(page: Path) -> Rule:
    front, _ = _split(page)
    try:
        table = tomllib.loads(front)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{page}: front matter: {error}") from error
    unknown = sorted(table.keys() - {"summary", "severity", "found-by", "fix", "default", "aliases"})
    if unknown:
        raise CatalogueError(f"{page}: front matter: unknown key '{unknown[0]}'")
    for name in (page.stem, page.parent.name):
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise CatalogueError(f"{page}: '{name}' is not a name in lower case with hyphens")
    severity = cast(Severity, _one_of(page, table, "severity", SEVERITIES))
    return Rule(
        name=page.stem,
        family=page.parent.name,
        summary=_summary(page, table),
        severity=severity,
        found_by=cast(tuple[FoundBy, ...], _words(page, table, "found-by", get_args(FoundBy))),
        fix=cast(Fix, _one_of(page, table, "fix", get_args(Fix))),
        on_by_default=_flag(page, table, "default", severity != "info"),
        aliases=_words(page, table, "aliases") if "aliases" in table else (),
        page=page,
    )


def _summary(page: Path, table: Mapping[str, Any]) -> str:
    value = table.get("summary")
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise CatalogueError(f"{page}: front matter: summary must be one line of text")
    return value


def _flag(page: Path, table: Mapping[str, Any], key: str, otherwise: bool) -> bool:
    value = table.get(key, otherwise)
    if not isinstance(value, bool):
        raise CatalogueError(f"{page}: front matter: {key} must be true or false, not {value!r}")
    return value


def _one_of(page: Path, table: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str:
    value = table.get(key)
    if value not in allowed:
        raise CatalogueError(f"{page}: front matter: {key} must be one of {', '.join(allowed)}, not {value!r}")
    return cast(str, value)


def _words(page: Path, table: Mapping[str, Any], key: str, allowed: Sequence[str] = ()) -> tuple[str, ...]:
    value = table.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise CatalogueError(f"{page}: front matter: {key} must be a list of words, not {value!r}")
    wrong = [word for word in value if allowed and word not in allowed]
    if wrong:
        raise CatalogueError(f"{page}: front matter: {key} may hold {', '.join(allowed)}, not '{wrong[0]}'")
    return tuple(value)


def _fences(page: Path) -> Iterator[_Fence]:
    """The fenced blocks of a page, each with the words after its opening fence."""
    front, markdown = _split(page)
    offset = front.count("\n") + 3
    mark, info, start = "", "", 0
    held: list[str] = []
    for number, text in enumerate(markdown.split("\n"), offset + 1):
        if mark and text.strip() == mark:
            yield _Fence(info, "".join(f"{line}\n" for line in held), start)
            mark = ""
        elif mark:
            held.append(text)
        elif opening := re.match(r"(`{3,})([^`]*)$", text):
            mark, info = opening.group(1), " ".join(opening.group(2).split())
            start, held = number + 1, []
    if mark:
        raise CatalogueError(f"{page}:{start - 1}: the block that opens here is not closed")


def _main(arguments: Sequence[str]) -> int:
    if list(arguments) != ["--write-index"]:
        print("usage: python -m precisionlint.catalogue --write-index", file=sys.stderr)
        return 2
    (folder() / "README.md").write_text(index(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
