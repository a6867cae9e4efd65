"""Where the report of ``check`` goes: several forms at once, each to standard output or to a file of its own."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from msgspec import Struct

from precisionlint.commands.common import UsageError
from precisionlint.findings import Report
from precisionlint.report import outputs
from precisionlint.report.color import colored


class Output(Struct, frozen=True):
    """A form, and the file that it goes to; None is standard output."""

    form: str
    file: str | None


def output(text: str) -> Output:
    """``FORMAT`` or ``FORMAT:FILE``, as an option's type."""
    form, colon, file = text.partition(":")
    if form not in outputs.FORMATS:
        known = ", ".join(outputs.FORMATS)
        raise argparse.ArgumentTypeError(f"invalid choice: '{form}' (choose from {known}; FORMAT:FILE writes a file)")
    if colon and not file:
        raise argparse.ArgumentTypeError(f"'{text}' names no file")
    return Output(form, file or None)


def outputs_of(given: Sequence[Output], file: str | None, *, statistics: bool) -> list[Output]:
    """The outputs that the options ask for: text on standard output, unless another form goes there."""
    found = [Output(each.form, each.file or file) for each in given] or [Output("text", file)]
    if not any(each.file is None for each in found) and file is None:
        found.append(Output("text", None))
    for name in {each.file for each in found}:
        if sum(each.file == name for each in found) > 1:
            raise UsageError(f"two forms go to {name or 'standard output'}; write --format FORMAT:FILE")
    if statistics and not any(each.form in ("text", "concise") for each in found):
        raise UsageError("--statistics is told by the forms text and concise only")
    return found


def write_files(report: Report, wanted: Sequence[Output], style: outputs.Style) -> None:
    """Writes the reports that go to files. Raises UsageError where one cannot be written."""
    for each in wanted:
        if each.file is None:
            continue
        try:
            os.makedirs(os.path.dirname(each.file) or ".", exist_ok=True)
            with open(each.file, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.writelines(f"{line}\n" for line in outputs.render(each.form, report, style))
        except OSError as error:
            raise UsageError(f"{each.file}: cannot be written: {(error.strerror or str(error)).lower()}") from error


def lines(report: Report, wanted: Sequence[Output], style: outputs.Style, color: str) -> Iterator[str]:
    """What goes to standard output."""
    for each in wanted:
        if each.file is None:
            shade = colored(color, sys.stdout)
            yield from outputs.render(each.form, report, outputs.Style(shade, *_rest(style)))


def _rest(style: outputs.Style) -> tuple[bool, bool, bool]:
    return style.verbose, style.suppressed, style.statistics


def _plain(name: str) -> str:
    """A name that no terminal obeys and every one can show."""
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in name)


class ProgressLine:
    """One line on a terminal that says how far a long run is; it appears after a second and leaves nothing behind."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._start = self._last = time.monotonic()
        self._shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._stream is None or now - self._start < 1 or now - self._last < 0.1:
            return
        self._last, self._shown = now, True
        bar = "#" * (20 * done // max(total, 1))
        self._write(f"\r\x1b[K[{bar:<20}] {done} of {total} files  {_plain(name)[-40:]}")

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, io.UnsupportedOperation):
            self._stream, self._shown = None, False
