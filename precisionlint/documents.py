"""The programs that a file holds: one in a Python file, one in a notebook (its code cells in order), one in each block of Markdown.

A program is Python source with its lines where the reader needs them; ``Program.locate`` leads from a place in it to the place in
the document. What IPython adds to the language is replaced by Python of as many lines that does as little as is known of it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from precisionlint.findings import FileError, Place
from precisionlint.patterns import regex
from precisionlint.source.parsing import UnreadableError, parse

NOTEBOOK = ".ipynb"
MARKDOWN = (".md", ".markdown")
SUFFIXES = (".py", NOTEBOOK)

PYTHON_CELLS = frozenset({"time", "timeit", "capture", "prun", "python", "python3", "pypy", "memit", "mprun", "debug"})
"""Cell magics below which Python stands; below all others stands something else."""
LINE_MAGICS = frozenset({"time", "timeit", "prun", "memit"})
"""Line magics that run the Python after them."""
LINE = regex(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line of any kind of text, with what ends it."""
ESCAPE = regex(r"(?P<indent>[ \t]*)(?P<mark>%%|%|!!|!|\?{1,2})(?P<rest>.*)", re.DOTALL)
ASSIGNED = regex(r"(?P<left>[ \t]*[\w.\[\]'\", ]+=[ \t]*)(?P<mark>[%!])(?P<rest>[^=].*)", re.DOTALL)
AUTOMAGIC = regex(r"(?P<indent>[ \t]*)(?:cd|ls|ll|mkdir|rmdir|cp|mv|rm|cat|pip|conda|more|less|man)[ \t]+\S")
"""How a line begins that IPython takes for a magic without its `%` where it is no Python."""
ASKED = regex(r"(?P<indent>[ \t]*)(?P<name>[\w.*]+)\?{1,2}[ \t]*$")
FENCE = regex(r"(?P<indent>[ \t]*(?:>[ \t]?)*)(?P<fence>`{3,}|~{3,})[ \t]*\{?(?P<info>[^`]*)$")


class DocumentError(Exception):
    """A notebook that cannot be read; the text says why."""


class Broken(Struct, frozen=True):
    """A cell that is no Python: the line of it that says so (0 where it has none), and what it holds."""

    cell: int
    line: int
    message: str
    data: bytes


class Program(Struct, frozen=True):
    """Python source, and where its lines stand: (cell, line of the cell) of each in a notebook, ``indent``: columns cut off.
    Of cells that are ``broken`` the lines are empty."""

    data: bytes
    cells: tuple[tuple[int, int], ...] = ()
    indent: int = 0
    whole: bool = True
    """False for a part of a document that need not be Python at all."""
    broken: tuple[Broken, ...] = ()

    def errors(self, path: str) -> tuple[FileError, ...]:
        """What to say of broken cells: one line for a notebook."""
        if not self.broken:
            return ()
        first, *others = self.broken
        cells = ", ".join(str(each.cell) for each in others)
        more = f" (and cell{'s' * (len(others) > 1)} {cells})" if others else ""
        line = f", line {first.line}" if first.line else ""
        return (FileError(path, None, f"cell {first.cell}{line}: {first.message}{more}"),)

    def locate(self, place: Place) -> Place:
        """The place in the document of a place in the program."""
        if self.indent:
            return replace(place, column=place.column + self.indent, end_column=place.end_column + self.indent)
        if not self.cells:
            return place
        cell, line = self.line(place.line)
        end_cell, end_line = self.line(place.end_line)
        return replace(place, line=line, end_line=end_line if end_cell == cell else line, cell=cell)

    def line(self, line: int) -> tuple[int, int]:
        """(cell, line) of a line of the program."""
        return self.cells[min(line, len(self.cells)) - 1] if self.cells else (0, line)


def kind(path: str) -> str:
    """``notebook``, ``markdown``, ``python`` (a script needs no suffix) or ``other``, by the name of a file."""
    name = path.rpartition("/")[2].lower()
    if name.endswith(NOTEBOOK):
        return "notebook"
    if name.endswith(MARKDOWN):
        return "markdown"
    return "python" if name.endswith((".py", ".pyw")) or "." not in name else "other"


def programs(path: str, data: bytes) -> list[Program]:
    """The programs of a file. Raises DocumentError."""
    match kind(path):
        case "notebook":
            return [notebook(data)]
        case "markdown":
            return list(blocks(data.decode("utf-8", errors="replace")))
        case _:
            return [Program(data)]


def load(data: bytes) -> dict[str, object]:
    """A notebook's JSON. Raises DocumentError."""
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"is no notebook: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise DocumentError("is no notebook of version 4: it has no list of cells")
    return content


def source_of(cell: object) -> str:
    """The text of a cell, which is one string or a list of them."""
    source = cell.get("source", "") if isinstance(cell, dict) else ""
    if isinstance(source, list):
        source = "".join(each for each in source if isinstance(each, str))
    return source.replace("\r\n", "\n").replace("\r", "\n") if isinstance(source, str) else ""


def has_source(cell: object) -> bool:
    """Whether a cell holds a text, or says nothing of one."""
    source = cell.get("source") if isinstance(cell, dict) else 0
    return (
        source is None
        or isinstance(source, str)
        or (isinstance(source, list) and all(isinstance(each, str) for each in source))
    )


def notebook(data: bytes) -> Program:
    """The code cells of a notebook as one program, those left out that are no Python, or no cells. Raises DocumentError."""
    content = load(data)
    metadata = content.get("metadata")
    language = metadata.get("language_info", {}) if isinstance(metadata, dict) else {}
    name = language.get("name", "python") if isinstance(language, dict) else "python"
    held: dict[int, list[str]] = {}
    cells = content["cells"] if name in ("python", "ipython") else []
    assert isinstance(cells, list)
    odd = [number for number, cell in enumerate(cells, 1) if not has_source(cell)]
    broken = tuple(Broken(number, 0, "has no text (or list of texts) as its source", b"") for number in odd)
    for number, cell in enumerate(cells, 1):
        if number not in odd and cell.get("cell_type") == "code":
            held[number] = list(plain(source_of(cell)))
    if _fault(0, _joined(held.values())) is not None:
        faults = (_fault(number, _joined([lines])) for number, lines in held.items())
        wrong = [fault for fault in faults if fault is not None]
        held |= {each.cell: ["" for _ in held[each.cell]] for each in wrong}
        broken = tuple(sorted((*broken, *wrong), key=lambda each: each.cell))
    places = tuple((number, line) for number, lines in held.items() for line in range(1, len(lines) + 1))
    return Program(_joined(held.values()), places, broken=broken)


def _joined(cells: Iterable[list[str]]) -> bytes:
    return "".join(f"{line}\n" for lines in cells for line in lines).encode("utf-8", errors="replace")


def _fault(cell: int, data: bytes) -> Broken | None:
    """What makes a cell no Python by itself."""
    try:
        parse(data)
    except UnreadableError as error:
        return Broken(cell, error.line or 1, error.message, data)
    return None


def with_sources(data: bytes, cells: Iterable[int], changed: Callable[[int, str], str]) -> bytes:
    """A notebook with the sources of some cells changed (cell from 1, source -> source) and all else as it was, its outputs among it.
    Raises DocumentError."""
    text = data.decode("utf-8")
    content: Any = load(data)
    written = writer(text, content)
    for number in cells:
        cell = content["cells"][number - 1]
        source = changed(number, "".join(cell["source"]))
        cell["source"] = LINE.findall(source) if isinstance(cell["source"], list) else source
    return written(content).encode("utf-8")


def writer(text: str, content: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """The way of writing JSON that gives back the text. Raises DocumentError."""
    for indent in (1, 2, 4, None, "\t"):
        for ascii_only in (False, True):
            for end in ("\n", ""):

                def write(
                    content: Mapping[str, Any], indent: Any = indent, ascii_only: bool = ascii_only, end: str = end
                ) -> str:
                    return json.dumps(content, indent=indent, ensure_ascii=ascii_only) + end

                if write(content) == text:
                    return write
    raise DocumentError("its JSON is not laid out as Jupyter does it, so writing it would change all of it")


def plain(source: str) -> Iterator[str]:
    """The lines of a cell as Python: magics, shell lines and questions become calls or nothing, and their number stays."""
    lines = source.split("\n")
    first = next((line for line in lines if line.strip()), "").lstrip()
    if first.startswith("%%"):
        python = first[2:].split(maxsplit=1)[:1]
        if not python or python[0] not in PYTHON_CELLS:
            yield from ("" for _ in lines)
            return
    inside = _inside_strings(lines)
    continued = False
    for number, line in enumerate(lines, 1):
        if continued:
            continued = line.rstrip().endswith("\\")
            yield ""
        elif number in inside:
            yield line
        else:
            changed = _plain_line(line)
            continued = changed != line and line.rstrip().endswith("\\")
            yield changed


def _plain_line(line: str) -> str:
    if asked := ASKED.match(line):
        return f"{asked['indent']}pass"
    if escape := ESCAPE.match(line):
        words = escape["rest"].split(maxsplit=1)
        if escape["mark"] == "%" and words and words[0] in LINE_MAGICS and len(words) > 1:
            return escape["indent"] + re.sub(r"^(?:-\w+(?:[ \t]+\d+)?[ \t]+)*", "", words[1])
        return f"{escape['indent']}pass"
    if assigned := ASSIGNED.match(line):
        words = assigned["rest"].split(maxsplit=1)
        if assigned["mark"] == "%" and len(words) > 1 and words[0] in LINE_MAGICS:
            return assigned["left"] + words[1]
        return f"{assigned['left']}get_ipython().getoutput({assigned['rest'].rstrip(chr(92)).strip()!r})"
    if (automagic := AUTOMAGIC.match(line)) and not _is_python(line.strip()):
        return f"{automagic['indent']}pass"
    return line


def _is_python(line: str) -> bool:
    try:
        ast.parse(line)
    except (SyntaxError, ValueError):
        return False
    return True


def _inside_strings(lines: list[str]) -> frozenset[int]:
    """The lines that begin inside a string of three quotes or inside brackets, where a `%` or `!` is Python's own."""
    inside: set[int] = set()
    quote, depth = "", 0
    token = re.compile(r"\\.|'''|\"\"\"|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|#.*|[()\[\]{}]", re.DOTALL)
    for number, line in enumerate(lines, 1):
        if quote or depth:
            inside.add(number)
        elif _plain_line(line) != line:
            continue
        position = 0
        while match := token.search(line, position):
            position = match.end()
            text = match[0]
            if quote:
                quote = "" if text == quote else quote
                if quote and len(text) > 2 and text[0] in "'\"" and text not in ("'''", '"""'):
                    position = match.start() + 1
            elif text in ("'''", '"""'):
                quote = text
            elif text in "([{":
                depth += 1
            elif text in ")]}":
                depth = max(0, depth - 1)
    return frozenset(inside)


def blocks(text: str) -> Iterator[Program]:
    """Each fenced block of Python in a Markdown text, its lines where they stand in it."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    opened: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(lines, 1):
        match = FENCE.match(line)
        if opened is None:
            if match:
                opened, start = match, number
        elif match and match["fence"].startswith(opened["fence"]) and not match["info"].strip():
            if _language(opened["info"]) in ("python", "py", "python3"):
                indent = len(opened["indent"])
                body = [_cut(each, indent) for each in lines[start : number - 1]]
                source = "\n" * start + "".join(f"{each}\n" for each in body)
                yield Program(source.encode("utf-8", errors="replace"), indent=indent, whole=False)
            opened = None


def _language(info: str) -> str:
    word = re.match(r"\.?([\w+-]+)", info.strip())
    return word[1].lower() if word else ""


def _cut(line: str, indent: int) -> str:
    return line[indent:] if not line[:indent].strip(" \t>") else line
