"""``precisionlint check``: its options, and what it makes of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from precisionlint import catalogue
from precisionlint.commands.common import Outcome, UsageError, add_color, colored, complain, words
from precisionlint.config import DEVICES, Configuration, Settings, shown

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
    check.add_argument(
        "paths", metavar="PATH", nargs="+", help="a file, or a folder: its Python files, notebooks and configurations"
    )
    _add_rules(check.add_argument_group("which rules", "RULES: names, families or `all`, separated by commas"))
    _add_files(check.add_argument_group("which files and settings"))
    _add_report(check.add_argument_group("how to report"))
    check.add_argument("--no-cache", action="store_true", help="read everything anew (there is no cache yet)")
    check.set_defaults(run=run)


def _add_rules(group: argparse._ArgumentGroup) -> None:
    for option, text in (
        ("--select", "look for these rules only"),
        ("--extend-select", "look for these rules too"),
        ("--ignore", "do not look for these rules"),
    ):
        group.add_argument(option, metavar="RULES", type=words, action="extend", default=[], help=text)
    group.add_argument(
        "--assume",
        metavar="NAME=VALUE",
        type=_assumption,
        action="append",
        default=[],
        help="read one configuration only, such as use_amp=True",
    )
    group.add_argument("--device", choices=DEVICES, help="what the programs train on, whatever they say")
    group.add_argument(
        "--require-reason", action="store_true", help="ask for a reason in comments that silence findings"
    )


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--exclude", metavar="PATTERN", action="append", default=[], help="leave out instead of the default"
    )
    group.add_argument("--extend-exclude", metavar="PATTERN", action="append", default=[], help="leave out too")
    group.add_argument("--force-exclude", action="store_true", help="leave out excluded files even if they are named")
    group.add_argument("--markdown", action="store_true", help="read blocks of Python in Markdown files too")
    group.add_argument("--config", metavar="FILE", help="take the settings from this file")
    group.add_argument("--isolated", action="store_true", help="take no settings from files")
    group.add_argument("--show-settings", action="store_true", help="show the settings of each PATH and stop")


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", choices=("text", "json"), default="text", help="how to report (default: text)")
    group.add_argument("--show-suppressed", action="store_true", help="show what comments silence")
    group.add_argument("--verbose", action="store_true", help="name each place where reading gave up")
    add_color(group)


def _assumption(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as use_amp=True or args.dtype=fp16")
    return name, value


def run(options: argparse.Namespace) -> Outcome:
    if options.config is not None and options.isolated:
        raise UsageError("--config and --isolated contradict each other")
    configuration = Configuration(_overrides(options), path=options.config, isolated=options.isolated)
    settings = _settings(configuration, options.paths[0])
    if options.show_settings:
        return Outcome(0, _settings_lines(configuration, options.paths))
    _require_rules(settings)

    from precisionlint.checking import Request, check
    from precisionlint.report import json, text

    report = check(Request(tuple(options.paths), configuration, markdown=options.markdown))
    for error in report.errors:
        print(text.error_line(error), file=sys.stderr)
    if not report.coverage.files and not report.errors:
        complain(f"no Python and no configuration files in {', '.join(options.paths)}")
    if options.format == "json":
        return Outcome(report.exit_code, [json.dumps(report)])
    color = colored(options.color, sys.stdout)
    lines = text.render(report, color=color, verbose=options.verbose, suppressed=options.show_suppressed)
    return Outcome(report.exit_code, lines)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives."""
    assume = dict(options.assume)
    for name, value in options.assume:
        if assume[name] != value:
            raise UsageError(f"--assume gives {name} two values, {value} and {assume[name]}")
    values: dict[str, Any] = {
        "select": tuple(options.select),
        "extend_select": tuple(options.extend_select),
        "ignore": tuple(options.ignore),
        "exclude": tuple(options.exclude),
        "extend_exclude": tuple(options.extend_exclude),
        "force_exclude": options.force_exclude,
        "require_reason": options.require_reason,
        "assume": assume,
        "device": options.device,
    }
    return {name: value for name, value in values.items() if value}


def _settings(configuration: Configuration, path: str) -> Settings:
    """The settings of a file or of the files in a folder."""
    return configuration.of_folder(Path(path).resolve()) if os.path.isdir(path) else configuration.of(Path(path))


def _settings_lines(configuration: Configuration, paths: list[str]) -> list[str]:
    lines: list[str] = []
    for path in paths:
        if len(paths) > 1:
            lines += ["", f"# {path}"] if lines else [f"# {path}"]
        lines += shown(_settings(configuration, path))
    return lines


def _require_rules(settings: Settings) -> None:
    if not settings.rules:
        raise UsageError("these settings leave no rule to look for")
    if not any("check" in catalogue.find(name).found_by for name in settings.rules):
        raise UsageError("check finds none of these rules; `precisionlint rules` says what does")
