"""What the lines of a `.gitignore` file say of a path, in git's own terms; it knows neither folders nor repositories.

Matching is git's: a path is held against each pattern whole and the last one that matches decides, because a walk from
the top asks about every folder on its way. Libraries that match paths by their beginnings decide some re-included paths
differently. The one thing not known are classes such as `[[:alpha:]]`: a line that uses one ignores nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from msgspec import Struct

from precisionlint.patterns import regex

_TOKEN = regex(
    r"""
      (?:^|(?<=/)) \*\*+ (?: (?P<folders>/) | (?P<rest>$) )
    | (?P<stars> \*+ )
    | (?P<one> \? )
    | \[ (?: (?P<negated>[!^]) | (?![!^]) ) (?P<members> (?: \\. | [^\\] ) (?: \\. | [^\]\\] )* ) \]
    | \\ (?P<escaped> . )
    | (?P<literal> [^\\\[] )
    """,
    re.VERBOSE | re.DOTALL,
)
_TRIMMED = regex(r"(?:\\.|[^ ]|[ ]+(?=[^ ]))*", re.DOTALL)


class Patterns(Struct, frozen=True):
    """The patterns of one ignore file: runs of lines that say the same, the last line first."""

    runs: tuple[tuple[bool, re.Pattern[str]], ...]

    def verdict(self, path: str) -> bool | None:
        """Whether they ignore a path, or None where they say nothing of it.

        The path counts from the ignore file's folder, with `/`; that of a folder ends in `/`.
        """
        return next((ignored for ignored, pattern in self.runs if pattern.fullmatch(path)), None)


def parse(text: str) -> Patterns:
    """The patterns of an ignore file's text; a line that git would not understand says nothing here either."""
    last_first = reversed(list(_lines(text.split("\n"))))
    return Patterns(
        tuple(
            (ignored, re.compile("|".join(pattern for _, pattern in run), re.DOTALL))
            for ignored, run in groupby(last_first, key=itemgetter(0))
        )
    )


def _lines(lines: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """(whether a match ignores, regular expression) of each line that is a pattern."""
    for line in lines:
        if line.startswith("#"):
            continue
        trimmed = _TRIMMED.match(line.removesuffix("\r"))
        glob = trimmed.group() if trimmed else ""
        ignored = not glob.startswith("!")
        glob = glob.removeprefix("!")
        end = "(?<!/)/" if glob.endswith("/") else "(?<!/)/?"  # a folder's last slash is no part of its name
        glob = glob.removesuffix("/")
        start = "" if "/" in glob else "(?:.*/)?"
        expression = _expression(glob.removeprefix("/"))
        if expression:
            yield ignored, f"{start}{expression}{end}"


def _expression(glob: str) -> str:
    """The regular expression of a glob; empty where it is none."""
    position, parts = 0, []
    while position < len(glob):
        token = _TOKEN.match(glob, position)
        if token is None:
            return ""
        match token.lastgroup:
            case "folders":
                parts.append("(?:.*/)?")
            case "rest":
                parts.append(".+")
            case "stars":
                parts.append("[^/]*")
            case "one":
                parts.append("[^/]")
            case "members":
                if "[:" in token["members"]:
                    return ""
                parts.append(_class(token["members"], negated=bool(token["negated"])))
            case _:
                parts.append(re.escape(token["escaped"] or token["literal"]))
        position = token.end()
    return "".join(parts)


def _class(members: str, *, negated: bool) -> str:
    """One character out of `members`, a bracket's inside; never a `/`."""
    allowed = ""
    for first, last in re.findall(r"(\\.|.)(?:-(\\.|.))?", members, re.DOTALL):
        allowed += re.escape(first[-1])
        if last and first[-1] <= last[-1]:
            allowed += f"-{re.escape(last[-1])}"
    if negated:
        return f"[^/{allowed}]"
    return f"(?!/)[{allowed}]"
