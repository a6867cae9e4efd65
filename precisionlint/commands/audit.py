"""``precisionlint audit``: its options, and what it makes of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable

from precisionlint.commands.common import Outcome, UsageError, add_color, complain
from precisionlint.report.color import colored

EXIT_CODES = """\
exit codes:
  0  nothing found in this run (findings of severity info do not count)
  1  at least one error or warning that was measured, or that check reads and no single step can show;
     what belongs to another configuration, was not reached or was refuted is none of this run
  2  wrong usage
  3  the script failed, or ended before the step came
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    audit = commands.add_parser(
        "audit",
        help="run a training script and report what one of its steps did with its dtypes",
        description="Runs a training script unchanged, audits one of its optimizer steps and stops it. Needs torch.",
        usage="precisionlint audit [OPTIONS] SCRIPT.py [ARGS...]\n"
        "       precisionlint audit [OPTIONS] -m MODULE [ARGS...]",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    audit.add_argument("--step", metavar="N", type=_step, default=2, help="which iteration to audit (default: 2)")
    audit.add_argument("--keep-running", action="store_true", help="let the script go on after that step")
    audit.add_argument("--format", choices=("text", "json"), default="text", help="how to report (default: text)")
    audit.add_argument("--out", metavar="FILE", help="write the report there (of several ranks: FILE-rankN)")
    audit.add_argument(
        "--eager", action="store_true", help="run what the script compiles uncompiled, so that it is seen"
    )
    audit.add_argument("--values", action="store_true", help="read every result, to name the first that is not finite")
    audit.add_argument("--all", action="store_true", help="list every op and place instead of groups")
    add_color(audit)
    audit.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    audit.add_argument("script", metavar="SCRIPT.py", nargs="?", help="the script, which prints to standard error")
    audit.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")
    audit.set_defaults(run=run)


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not the number of a step, such as 2")
    return int(text)


def run(options: argparse.Namespace) -> Outcome:
    command = options.module if options.module is not None else [options.script, *options.arguments]
    if not command or command[0] is None:
        raise UsageError("audit needs a script, or -m and a module")
    if options.module is None and not os.path.isfile(command[0]):
        raise UsageError(f"{command[0]}: {'a folder, not a script' if os.path.isdir(command[0]) else 'no such file'}")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError("audit needs torch: pip install 'precisionlint[audit]'")

    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    out = None if options.out is None else os.path.abspath(options.out if world == 1 else _of_rank(options.out, rank))
    if out is not None:
        _write(out, ())  # before hours of training, not after them, one finds that it cannot be written

    from precisionlint import audit_command
    from precisionlint.policy import PolicyError
    from precisionlint.report.layout import PIPE, width_of
    from precisionlint.trace.patches import UnsupportedTorchError

    try:
        audited = audit_command.run(
            command,
            module=options.module is not None,
            step=options.step,
            keep_running=options.keep_running,
            values=options.values,
            eager=options.eager,
        )
    except (PolicyError, UnsupportedTorchError) as error:
        raise UsageError(str(error)) from error
    color = options.out is None and colored(options.color, sys.stdout)
    width = PIPE if options.out is not None else width_of(sys.stdout)
    lines = audit_command.lines(audited, format=options.format, color=color, all=options.all, width=width)
    if out is not None:
        _write(out, lines)
        lines = iter(())
    elif rank > 0:
        complain(f"rank {rank}: {next(lines)} (with --out each rank writes its report)")
        lines = iter(())
    return Outcome(audited.exit_code, lines if world == 1 else audit_command.together(lines))


def _write(path: str, lines: Iterable[str]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def _of_rank(path: str, rank: int) -> str:
    """``report-rank1.json`` for ``report.json``."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}-rank{rank}{suffix}"
