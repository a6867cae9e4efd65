"""``precisionlint check``: its options, and what it makes of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint import baseline, catalogue
from precisionlint.commands.check_output import Output, ProgressLine, lines, output, outputs_of, write_files
from precisionlint.commands.common import Outcome, UsageError, add_color, complain, words
from precisionlint.config import DEVICES, Configuration, Settings, wrong_pattern, wrong_version
from precisionlint.config import shown as shown_settings
from precisionlint.errors import InputError
from precisionlint.findings import CONFIDENCES, SEVERITIES, FileError, Report
from precisionlint.report.excerpt import Sources, shown
from precisionlint.report.outputs import FORMATS, Style
from precisionlint.report.text import counted, error_line

if TYPE_CHECKING:
    from precisionlint.checking import Request
    from precisionlint.fixing import Fixed

STDIN = "-"
NEEDED = {"diff_base": "revision of git", "cache_dir": "folder"}
"""What options name that do not name a file."""

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
        "paths",
        metavar="PATH",
        nargs="+",
        help="a file, a folder (its Python files, notebooks and configurations), or - (standard input)",
    )
    _add_rules(check.add_argument_group("which rules", "RULES: names, families or `all`, separated by commas"))
    _add_files(check.add_argument_group("which files and settings"))
    _add_report(check.add_argument_group("how to report"))
    _add_fixes(check.add_argument_group("fixes"))
    _add_known(check.add_argument_group("what is known already"))
    _add_running(check.add_argument_group("how to run"))
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
    group.add_argument(
        "--min-confidence",
        choices=CONFIDENCES,
        help="the least that a finding must be (default: likely; possible with `all`: what a library's callers decide)",
    )
    group.add_argument("--device", choices=DEVICES, help="what the programs train on, whatever they say")
    group.add_argument(
        "--torch-version",
        metavar="VERSION",
        type=_version,
        help="the torch that the programs run with, 2.6 or '>=2.4,<2.9' (default: what the project's requirements allow)",
    )
    group.add_argument(
        "--require-reason", action="store_true", help="ask for a reason in comments that silence findings"
    )


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--exclude",
        metavar="PATTERN",
        type=_pattern,
        action="append",
        default=[],
        help="leave out instead of the default",
    )
    group.add_argument(
        "--extend-exclude", metavar="PATTERN", type=_pattern, action="append", default=[], help="leave out too"
    )
    group.add_argument("--force-exclude", action="store_true", help="leave out excluded files even if they are named")
    group.add_argument("--markdown", action="store_true", help="read blocks of Python in Markdown files too")
    group.add_argument(
        "--stdin-filename", metavar="PATH", help="the name of what is read from standard input (PATH: -)"
    )
    group.add_argument("--config", metavar="FILE", help="take the settings from this file")
    group.add_argument("--isolated", action="store_true", help="take no settings from files")
    group.add_argument("--show-settings", action="store_true", help="show the settings of each PATH and stop")


def _add_report(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--format",
        metavar="FORMAT[:FILE]",
        type=output,
        action="append",
        default=[],
        help=f"{', '.join(FORMATS)} (default: text); FORMAT:FILE writes a file and may be repeated",
    )
    group.add_argument("--output-file", metavar="FILE", help="write the report there instead of to standard output")
    group.add_argument("--statistics", action="store_true", help="tell how often each rule was found, not where")
    group.add_argument("--show-suppressed", action="store_true", help="show what comments and baselines silence")
    group.add_argument("--verbose", action="store_true", help="name each place where reading gave up")
    add_color(group)
    group.add_argument(
        "--fail-on",
        choices=SEVERITIES,
        default="warning",
        help="the least severity that fails the run (default: warning)",
    )
    group.add_argument("--exit-zero", action="store_true", help="exit with 0 whatever was found")


def _add_fixes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fix", action="store_true", help="fix what can be fixed safely, then report what is left")
    group.add_argument("--unsafe-fixes", action="store_true", help="make fixes too that change something else as well")
    group.add_argument(
        "--diff",
        action="store_true",
        help="show what --fix would change, change nothing; exit with 1 if it is anything",
    )


def _add_known(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--baseline", metavar="FILE", help="only findings that are not in this file count")
    group.add_argument("--write-baseline", metavar="FILE", help="write what is found now into this file")
    group.add_argument(
        "--diff-base", metavar="REV", help="only findings that have to do with lines changed since a revision of git"
    )
    group.add_argument("--add-ignores", action="store_true", help="write comments that silence what is found now")
    group.add_argument("--reason", metavar="TEXT", default="", help="the reason to write into these comments")


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--watch", action="store_true", help="run again whenever a file changes")
    group.add_argument("--no-cache", action="store_true", help="read everything anew, and keep nothing")
    group.add_argument("--cache-dir", metavar="DIR", help="keep what was read there (default: the user's cache folder)")
    group.add_argument(
        "--jobs", metavar="N", type=_jobs, help="read in so many processes (default: as many as it pays to start)"
    )


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of processes, such as 4")
    return int(text)


def _version(text: str) -> str:
    if fault := wrong_version(text):
        raise argparse.ArgumentTypeError(fault)
    return text


def _pattern(text: str) -> str:
    if fault := wrong_pattern(text):
        raise argparse.ArgumentTypeError(fault)
    return text


def _assumption(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as use_amp=True or args.dtype=fp16")
    return name, value


def run(options: argparse.Namespace) -> Outcome:
    wanted = _checked(options)
    return Outcome(0, _watched(options, wanted), live=True) if options.watch else _once(options, wanted)


def _watched(options: argparse.Namespace, wanted: Sequence[Output]) -> Iterator[str]:
    """The report of one run after the other, until an interrupt; settings that are wrong for a while are only told."""
    from precisionlint import watch
    from precisionlint.checking import suffixes

    counted_as = suffixes(markdown=options.markdown)
    before = watch.stamps(options.paths, counted_as)
    while True:
        try:
            yield from _once(options, wanted).lines
        except InputError as error:
            complain(str(error))
        yield f"waiting for changes (at {time.strftime('%H:%M:%S')}; Ctrl-C ends it)"
        before = watch.wait(options.paths, counted_as, before)
        yield ""


def _once(options: argparse.Namespace, wanted: Sequence[Output]) -> Outcome:
    configuration = Configuration(_overrides(options), path=options.config, isolated=options.isolated)
    if options.show_settings:
        return Outcome(0, _settings_lines(configuration, options.paths))
    texts = _texts(options)
    _require_rules(_settings(configuration, next(iter(texts), options.paths[0])))

    from precisionlint.checking import Request, check

    progress = ProgressLine(sys.stderr)
    request = Request(
        tuple(texts) or tuple(options.paths),
        configuration,
        texts=texts,
        markdown=options.markdown,
        baseline="" if options.write_baseline else options.baseline,
        since=options.diff_base or "",
        cache=not options.no_cache,
        jobs=options.jobs,
        progress=progress,
    )
    fixed = 0
    try:
        report = check(request)
        if options.fix or options.diff:
            changes, failed = _fixes(report, request, unsafe=options.unsafe_fixes)
            if options.diff:
                return _diff(changes, [*report.errors, *failed], exit_zero=options.exit_zero)
            fixed, report = _write_fixes(changes, failed, report, request)
    finally:
        progress.clear()
    for error in report.errors:
        print(error_line(error), file=sys.stderr)
    if not report.coverage.files and not report.errors:
        complain(_nothing(tuple(texts) or options.paths, configuration))
    for name in report.unheard:
        complain(f"nothing in these files is called {name}: to assume it changes nothing")
    for name in report.idle:
        complain(f"no undecided value in these files is called {name}: to assume it changes nothing")
    code = report.exit_code_at(options.fail_on)
    if options.write_baseline is not None:
        return _write_baseline(report, options.write_baseline)
    if options.add_ignores:
        return _add_ignores(report, options.reason, request)
    style = Style(verbose=options.verbose, suppressed=options.show_suppressed, statistics=options.statistics)
    write_files(report, wanted, style)
    if fixed:
        complain(f"fixed {counted(fixed, 'finding')}")
    return Outcome(0 if options.exit_zero and code == 1 else code, lines(report, wanted, style, options.color))


def _fixes(report: Report, request: Request, *, unsafe: bool) -> tuple[dict[str, Fixed], list[FileError]]:
    """What the fixes of a report change, and the files that cannot be fixed."""
    from precisionlint.checking import check
    from precisionlint.fixing import fix

    def check_text(name: str, data: bytes) -> Report:
        return check(replace(request, paths=(name,), texts={name: data}, progress=None, cache=False))

    return fix(report, check_text, unsafe=unsafe)


def _write_fixes(
    changes: dict[str, Fixed], failed: list[FileError], report: Report, request: Request
) -> tuple[int, Report]:
    """Writes what was fixed: how many findings that takes away, and the report of what is left."""
    from precisionlint.checking import check
    from precisionlint.fixing import write

    fixed, unwritten = write(changes)
    report = check(request) if changes else report
    return fixed, replace(report, errors=(*report.errors, *failed, *unwritten))


def _diff(changes: dict[str, Fixed], errors: Sequence[FileError], *, exit_zero: bool) -> Outcome:
    """The outcome of ``--diff``: what would change."""
    from precisionlint.fixing import diff

    for error in errors:
        print(error_line(error), file=sys.stderr)
    count = sum(each.count for each in changes.values())
    complain(f"would fix {counted(count, 'finding')}" if count else "nothing to fix")
    return Outcome(2 if errors else int(bool(changes) and not exit_zero), diff(changes))


def _checked(options: argparse.Namespace) -> list[Output]:
    """The outputs asked for; raises UsageError where options contradict each other."""
    apart = [("config", "isolated"), ("write_baseline", "add_ignores"), ("write_baseline", "diff_base")]
    apart += [
        (one, other)
        for one in ("fix", "diff")
        for other in ("write_baseline", "add_ignores", "watch", "show_settings", "statistics", "diff_base")
    ]
    apart += [("watch", each) for each in ("write_baseline", "add_ignores", "show_settings", "stdin_filename")]
    for one, other in apart:
        if getattr(options, one) and getattr(options, other):
            raise UsageError(f"--{one} and --{other} contradict each other".replace("_", "-"))
    if options.reason and not options.add_ignores:
        raise UsageError("--reason belongs to --add-ignores")
    if len(options.reason.splitlines()) > 1 or "#" in options.reason:
        raise UsageError("--reason must be one line without a #")
    for option in ("diff_base", "config", "baseline", "write_baseline", "cache_dir", "output_file"):
        if getattr(options, option) == "":
            raise UsageError(f"--{option.replace('_', '-')} is empty: it needs a {NEEDED.get(option, 'file')}")
    if STDIN in options.paths and len(options.paths) > 1:
        raise UsageError("standard input (-) is read alone")
    if STDIN in options.paths and options.watch:
        raise UsageError("--watch watches files, and standard input is none")
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise UsageError("--unsafe-fixes belongs to --fix or --diff")
    if options.fix and options.diff:
        options.fix = False  # as Ruff has it: what would be fixed is shown, not done
    if STDIN in options.paths and options.fix:
        raise UsageError("--fix writes files, and standard input is none; --diff shows what it would change")
    if STDIN in options.paths and options.add_ignores:
        raise UsageError("--add-ignores writes files, and standard input is none")
    if options.stdin_filename is not None and STDIN not in options.paths:
        raise UsageError("--stdin-filename belongs to standard input: PATH must be -")
    return outputs_of(options.format, options.output_file, statistics=options.statistics)


def _texts(options: argparse.Namespace) -> dict[str, bytes]:
    """What is read instead of files: standard input, under the name given for it."""
    if STDIN not in options.paths:
        return {}
    if sys.stdin is None:
        raise UsageError("standard input is closed: there is nothing to read from -")
    return {options.stdin_filename or "<stdin>": sys.stdin.buffer.read()}


def _nothing(paths: Sequence[str], configuration: Configuration) -> str:
    """Why no file was read, and none could not be."""
    from precisionlint.files import left_out

    named = [path for path in paths if not os.path.isdir(path)]
    left = [path for path in named if left_out(Path(path).resolve(), configuration)]
    if left:
        return f"left out, as the settings exclude it and force-exclude is on: {', '.join(map(shown, left))}"
    why = ", apart from what git ignores or the settings exclude" if len(named) < len(paths) else ""
    return f"no Python and no configuration files in {', '.join(map(shown, paths))}{why}"


def _write_baseline(report: Report, file: str) -> Outcome:
    number = baseline.write(Path(file), report.findings, Sources(report.texts))
    return Outcome(2 if report.errors else 0, [f"wrote {counted(number, 'finding')} to {file}"])


def _add_ignores(report: Report, reason: str, request: Request) -> Outcome:
    from precisionlint.add_ignores import add
    from precisionlint.checking import check

    def check_text(name: str, data: bytes) -> Report:
        return check(replace(request, paths=(name,), texts={name: data}, progress=None))

    written, errors = add(report, reason, check_text)
    for error in errors:
        print(error_line(error), file=sys.stderr)
    told = [f"{shown(path)}: {counted(number, 'finding')} silenced" for path, number in sorted(written.items())]
    return Outcome(2 if errors or report.errors else 0, told or ([] if errors else ["nothing to silence"]))


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
        "min_confidence": options.min_confidence,
        "require_reason": options.require_reason,
        "assume": assume,
        "device": options.device,
        "torch_version": options.torch_version,
        "cache_dir": os.path.abspath(options.cache_dir) if options.cache_dir else "",
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
        lines += shown_settings(_settings(configuration, path))
    return lines


def _require_rules(settings: Settings) -> None:
    if not settings.rules:
        raise UsageError("these settings leave no rule to look for")
    if not any("check" in catalogue.find(name).found_by for name in settings.rules):
        raise UsageError("check finds none of these rules; `precisionlint rules` says what does")
