"""``precisionlint check``: its options, and what it makes of them."""

from __future__ import annotations

import argparse
import re
import sys

from precisionlint import catalogue
from precisionlint.commands.common import Outcome, UsageError, add_color, colored, complain, words

EXIT_CODES = """\
exit codes:
  0  nothing found (findings of severity info do not count)
  1  at least one error or warning
  2  wrong usage, or a file that could not be read or parsed
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="read training code and report what is wrong with its precision",
        description="Reads training code, without running it, and reports faults of precision.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("paths", metavar="PATH", nargs="+", help="a file, or a folder: its Python files")
    rules = check.add_argument_group("which rules", "RULES: names, families or `all`, separated by commas")
    for option, text in (
        ("--select", "look for these rules only"),
        ("--extend-select", "look for these rules too"),
        ("--ignore", "do not look for these rules"),
    ):
        rules.add_argument(option, metavar="RULES", type=words, action="extend", default=[], help=text)
    check.add_argument(
        "--assume",
        metavar="NAME=VALUE",
        type=_assumption,
        action="append",
        default=[],
        help="read one configuration only, such as use_amp=True",
    )
    check.add_argument("--format", choices=("text", "json"), default="text", help="how to report (default: text)")
    check.add_argument("--verbose", action="store_true", help="name each place where reading gave up")
    check.add_argument("--no-cache", action="store_true", help="read everything anew (there is no cache yet)")
    add_color(check)
    check.set_defaults(run=run)


def _assumption(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as use_amp=True or args.dtype=fp16")
    return name, value


def run(options: argparse.Namespace) -> Outcome:
    select = catalogue.select(options.select, options.extend_select, options.ignore)
    if not select:
        raise UsageError("these options leave no rule to look for")
    if not any("check" in catalogue.find(name).found_by for name in select):
        raise UsageError("check finds none of these rules; `precisionlint rules` says what does")
    assume = dict(options.assume)
    for name, value in options.assume:
        if assume[name] != value:
            raise UsageError(f"--assume gives {name} two values, {value} and {assume[name]}")

    from precisionlint.checking import check
    from precisionlint.report import json, text

    report = check(options.paths, select=select, assume=assume)
    for error in report.errors:
        print(text.error_line(error), file=sys.stderr)
    if not report.coverage.files and not report.errors:
        complain(f"no Python files in {', '.join(options.paths)}")
    if options.format == "json":
        return Outcome(report.exit_code, [json.dumps(report)])
    color = colored(options.color, sys.stdout)
    return Outcome(report.exit_code, text.render(report, color=color, verbose=options.verbose))
