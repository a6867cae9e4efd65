"""The command line: options in, text and an exit code out. What each command does with them stands in ``commands``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from precisionlint import __version__
from precisionlint.commands import audit, check, rules, server, verify
from precisionlint.commands.common import Outcome, complain
from precisionlint.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; wrong usage raises SystemExit(2), as argparse does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the console cannot spell must not end the run
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        return _write(options.run(options))
    except InputError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="precisionlint",
        description="Finds precision faults in mixed-precision and FP8 training code.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"precisionlint {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (check, audit, verify, rules, server):
        command.add(commands)
    return parser


def _write(outcome: Outcome) -> int:
    """Prints an outcome; a reader that has had enough (`| head`) changes neither the exit code nor standard error."""
    try:
        for line in outcome.lines:
            print(line, flush=outcome.live)
        if sys.stdout is not None and not sys.stdout.closed:  # a server closes it at its end
            sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer has nowhere to go: without this, Python would complain again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            complain(f"cannot write the report: {(error.strerror or str(error)).lower()}")
            return 2
    return outcome.code
