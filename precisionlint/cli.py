"""The command line: options in, text and an exit code out. What each command does with them stands in ``commands``."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

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
        options = _options(arguments)
        if arguments is None and options.command == "check" and not options.watch:
            return _last(options)
        return _write(options.run(options))
    except InputError as error:
        complain(str(error))
        return 2
    except FileNotFoundError:
        try:
            os.getcwd()
        except FileNotFoundError:
            complain("the current folder is no longer there: change to one that is")
            return 2
        raise
    except KeyboardInterrupt:
        return 130


def _last(options: argparse.Namespace) -> int:
    """Runs a command after which the process ends: nothing in it is worth the garbage collector's walks, those of the interpreter's end
    among them (5 % of a run over one file)."""
    gc.disable()
    try:
        return _write(options.run(options))
    finally:
        gc.freeze()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are listed: a usage of twenty lines hides the one that matters."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options", file=sys.stderr)
        raise SystemExit(2)

    def unknown(self, word: str) -> NoReturn:
        """Tells of an option that is none."""
        from difflib import get_close_matches

        known = [name for action in self._actions for name in action.option_strings]
        near = get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.75)
        self.error(f"{word} is no option{f'; did you mean {near[0]}?' if near else ''}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="precisionlint",
        description="Finds precision faults in mixed-precision and FP8 training code.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"precisionlint {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, parser_class=Parser
    )
    for command in (check, audit, verify, rules, server):
        command.add(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.choices[options.command].unknown(unknown[0])
    return options


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
