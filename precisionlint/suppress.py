"""Comments that silence findings: ``# precisionlint: ignore[rule, rule] reason``, and ``ignore-file[…]`` at the top of a file.

A comment on a line of code speaks for findings on that line, and for those of the statement that begins or ends there; one on a
line of its own for the statement below it. Comments are found by tokenizing, so a string that looks like one is none.

Two rules are found here rather than on a timeline: ``unused-ignore`` and ``ignore-without-reason``.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from precisionlint import catalogue
from precisionlint.findings import Edit, Finding, Fix, Place, Suppressed
from precisionlint.patterns import regex

MARK = regex(rb"#\s*precision[-_]?lint\b", re.I)
"""What a file must hold to be looked through at all."""
NAMES = (b"precisionlint", b"precision-lint", b"precision_lint")
UNUSED, UNREASONED = "unused-ignore", "ignore-without-reason"
RULES = (UNUSED, UNREASONED)
COMMENT = regex(
    r"#\s*(?P<begins>precisionlint\s*:|precision[-_]?lint\b\s*[:-]?(?=\s*ignore(?:[-_]file)?(?![\w-])))"
    r"\s*(?P<word>[\w-]*)\s*(?:\[(?P<rules>[^\]]*)\])?(?P<reason>[^#]*)",
    re.I,
)
"""A comment for this program, and one that was meant for it: without the colon, or by another name."""
BEGINS = "precisionlint:"
WORDS = ("ignore", "ignore-file")


class Comment(Struct, frozen=True):
    """One comment. ``rules`` are the words in its brackets, each with its place; ``whole``: it speaks for the whole file."""

    at: Place
    word: str
    rules: tuple[tuple[str, Place], ...]
    reason: str
    whole: bool
    top: bool
    """Whether nothing but comments and the docstring stands before it."""
    next_line: int
    """The line of code below a comment that has a line of its own, else 0."""
    begins: str = BEGINS
    """How it begins; what begins otherwise was meant to silence something, and does not."""

    @property
    def heard(self) -> bool:
        """Whether it has the form of a comment that silences something."""
        return self.word in WORDS and self.begins == BEGINS


class Statements(Struct, frozen=True, dict=True):
    """The lines on which each line's innermost statement begins and ends (a compound one's heading)."""

    spans: tuple[tuple[int, int, int, int], ...]
    """First line, last line, last line of the heading, depth."""

    @cached_property
    def _by_line(self) -> list[tuple[int, int] | None]:
        lines: list[tuple[int, int] | None] = [None] * (max((end for _, end, _, _ in self.spans), default=0) + 1)
        for first, end, heading, _ in sorted(self.spans, key=lambda span: span[3]):
            lines[first : end + 1] = [(first, heading)] * (end + 1 - first)
        return lines

    def around(self, line: int) -> tuple[int, int]:
        """(first line, last line) of the innermost statement that a line belongs to."""
        found = self._by_line[line] if line < len(self._by_line) else None
        return found or (line, line)


def decoded(data: bytes) -> str:
    """The text of a program with its lines ended by newlines, as Python counts them. Raises SyntaxError, UnicodeDecodeError."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def speaks(data: bytes) -> bool:
    """Whether a file holds a comment for this program, or what was meant as one."""
    text = data.lower()
    return any(name in text for name in NAMES) and MARK.search(data) is not None


def comments(path: str, data: bytes) -> tuple[Comment, ...]:
    """The comments of a program that speak to this one, in order; none where it is no Python."""
    if not speaks(data):
        return ()
    found: list[Comment] = []
    waiting: list[int] = []
    line_has_code, code_seen, statements = 0, False, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(decoded(data)).readline):
            line, column = token.start
            if token.type == tokenize.COMMENT:
                for match in COMMENT.finditer(token.string):
                    alone = line != line_has_code
                    found.append(_comment(match, path, line, column, top=not code_seen and alone))
                    waiting += [len(found) - 1] if alone else []
            elif token.type == tokenize.NEWLINE:
                statements += 1
            elif token.type not in (
                tokenize.NL,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENCODING,
                tokenize.ENDMARKER,
            ):
                line_has_code = token.end[0]
                code_seen = code_seen or statements > 0 or token.type != tokenize.STRING
                for index in waiting:
                    found[index] = replace(found[index], next_line=line)
                waiting.clear()
    except (tokenize.TokenError, SyntaxError, ValueError):
        pass  # what is no Python is told elsewhere
    return tuple(found)


def configuration_comments(path: str, data: bytes) -> tuple[Comment, ...]:
    """The comments of a configuration that speak to this program: from a `#` at a line's start or after a space, in YAML, shell scripts and
    the JSON that takes comments. Each line is a statement of its own."""
    if not speaks(data):
        return ()
    found: list[Comment] = []
    waiting: list[int] = []
    code_seen = False
    for number, line in enumerate(data.decode("utf-8-sig", errors="replace").splitlines(), 1):
        code = re.split(r"(?:^|(?<=\s))(?:#|//)", line, maxsplit=1)[0].strip()
        for match in COMMENT.finditer(line):
            if match.start() == 0 or line[match.start() - 1].isspace():
                waiting += [] if code else [len(found)]
                found.append(_comment(match, path, number, 0, top=not code_seen and not code))
        if code:
            code_seen = True
            for index in waiting:
                found[index] = replace(found[index], next_line=number)
            waiting.clear()
    return tuple(found)


def _comment(match: re.Match[str], path: str, line: int, column: int, *, top: bool) -> Comment:
    def place(start: int, end: int) -> Place:
        return Place(path, line, column + start + 1, line, column + end + 1)

    rules = []
    if match["rules"] is not None:
        for word in re.finditer(r"[^\s,](?:[^,]*[^\s,])?", match["rules"]):
            offset = match.start("rules")
            rules.append((word[0], place(offset + word.start(), offset + word.end())))
    reason = match["reason"].strip()
    end = match.end("rules") + 1 if match["rules"] is not None else match.end("word")
    form = match["word"].lower()
    begins = re.sub(r"\s", "", match["begins"]).lower()
    return Comment(place(match.start(), end), form, tuple(rules), reason, form == "ignore-file", top, 0, begins)


def statements(data: bytes) -> Statements | None:
    """Where the statements of a program stand; None where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    spans: list[tuple[int, int, int, int]] = []
    pending: list[tuple[ast.AST, int]] = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        if isinstance(node, ast.stmt):
            first, end = _first(node), node.end_lineno or node.lineno
            body = getattr(node, "body", None)
            heading = max(first, min(_first(body[0]) - 1, end)) if isinstance(body, list) and body else end
            spans.append((first, end, heading, depth))
        pending += [(child, depth + 1) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return Statements(tuple(spans))


def _first(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def covering(line: int, comments: Sequence[Comment], statements: Statements) -> tuple[int, ...]:
    """The indices of the comments that speak for a finding on a line."""
    first, last = statements.around(line)
    return tuple(
        index
        for index, each in enumerate(comments)
        if (each.whole and each.top)
        or (not each.whole and (each.at.line in (line, first, last) or each.next_line in (line, first)))
    )


def apply(
    findings: Iterable[tuple[Finding, tuple[int, ...]]],
    comments: Sequence[Comment],
    rules: frozenset[str],
    *,
    judge: bool,
) -> tuple[list[Finding], list[Suppressed]]:
    """What counts of a file's findings (each with the comments that speak for it), and what does not.

    ``rules`` are those that were looked for. ``judge``: whether a comment that silences nothing may be called unused, which a
    file that was read in part does not allow.
    """
    means = [{word: _meant(word) for word, _ in each.rules} for each in comments]
    used: set[tuple[int, str]] = set()
    kept: list[Finding] = []
    suppressed: list[Suppressed] = []

    def take(finding: Finding, indices: Iterable[int]) -> None:
        by = None
        for index in indices:
            for word, names in means[index].items():
                if comments[index].heard and finding.rule in names:
                    used.add((index, word))
                    by = comments[index] if by is None else by
        if by is None:
            kept.append(finding)
        else:
            suppressed.append(Suppressed(finding, "comment", by.reason, by.at))

    for finding, indices in findings:
        take(finding, indices)
    whole = [index for index, each in enumerate(comments) if each.whole and each.top]
    for index, comment in enumerate(comments):
        own = dict.fromkeys([index, *whole])
        if UNREASONED in rules and comment.heard and not comment.reason:
            take(_finding(UNREASONED, "says no reason: write one after the bracket", comment.at), own)
        if UNUSED in rules and judge:
            for place, message in _unused(index, comment, means[index], used, rules):
                # A word that names no rule may be meant for one: which, only who wrote it knows.
                known = any(place == at and means[index][word] for word, at in comment.rules)
                fix = Fix((Edit("comment", place),)) if known else None
                take(replace(_finding(UNUSED, message, place), fix=fix), own)
    return kept, suppressed


def _unused(
    index: int, comment: Comment, means: dict[str, frozenset[str]], used: set[tuple[int, str]], rules: frozenset[str]
) -> Iterator[tuple[Place, str]]:
    if comment.begins != BEGINS:
        yield comment.at, f"silences nothing: it must begin with '# {BEGINS} {comment.word}', not '# {comment.begins}'"
        return
    if comment.word not in WORDS:
        yield comment.at, f"silences nothing: '{comment.word}' is neither ignore[…] nor ignore-file[…]"
        return
    if not comment.rules:
        first = re.split(r"[\s,:]", comment.reason, maxsplit=1)[0]
        if first and _meant(first):
            yield comment.at, f"silences nothing: a rule stands in brackets, {comment.word}[{first}]"
        else:
            yield comment.at, f"silences nothing: it names no rule, as {comment.word}[clip-before-unscale] does"
        return
    if comment.whole and not comment.top:
        yield comment.at, "silences nothing: ignore-file counts only above the file's first statement"
        return
    for word, place in comment.rules:
        names = means[word]
        if not names:
            yield place, f"silences nothing: {_unknown(word)}"
        elif names & set(RULES):
            continue  # whether it is used is only known after the others
        else:
            looked_for = {name for name in names if "check" in catalogue.find(name).found_by}
            if looked_for and looked_for <= rules and (index, word) not in used:
                where = "in this file" if comment.whole else "here"
                yield place, f"silences nothing: check finds no {word} {where}"


def _meant(word: str) -> frozenset[str]:
    try:
        return catalogue.select([word.lower()])
    except catalogue.UnknownNameError:
        return frozenset()


def _unknown(word: str) -> str:
    try:
        catalogue.select([word.lower()])
    except catalogue.UnknownNameError as error:
        return str(error)
    return ""


def _finding(rule: str, message: str, place: Place) -> Finding:
    page = catalogue.find(rule)
    return Finding(rule, page.family, page.severity, "certain", message, place)
