"""The command line: options in, text and an exit code out. What a run finds and how it is told is decided elsewhere."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from precisionlint import __version__, catalogue

EXIT_CODES = """\
exit codes:
  0  nothing found (findings of severity info do not count)
  1  at least one error or warning
  2  wrong usage, or a file that could not be read or parsed
"""
AUDIT_EXIT_CODES = """\
exit codes:
  0  nothing found (findings of severity info do not count)
  1  at least one error or warning, measured or read
  2  wrong usage
  3  the script failed, or ended before the step came
"""


class UsageError(Exception):
    """The options make no sense together."""


@dataclass(frozen=True)
class Outcome:
    """What a command leaves: its exit code, and the lines for standard output."""

    code: int
    lines: Iterable[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; wrong usage raises SystemExit(2), as argparse does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the console cannot spell must not end the run
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        return _write(options.run(options))
    except (UsageError, catalogue.UnknownNameError, catalogue.CatalogueError) as error:
        _complain(str(error))
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
    _add_check(commands)
    _add_audit(commands)
    _add_verify(commands)

    rules = commands.add_parser("rules", help="list the rules", description="Lists the rules by family.")
    rules.set_defaults(run=_rules)

    explain = commands.add_parser(
        "explain",
        help="show a rule's page",
        description="Shows a rule's page: what goes wrong, wrong and right code, an experiment, sources.",
    )
    explain.add_argument("name", metavar="NAME", help="the rule, such as clip-before-unscale")
    _add_color(explain)
    explain.set_defaults(run=_explain)
    return parser


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        rules.add_argument(option, metavar="RULES", type=_words, action="extend", default=[], help=text)
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
    _add_color(check)
    check.set_defaults(run=_check)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="hold Triton FP8 kernels against reference numerics",
        description="Runs a launcher, or the bundled kernels, on inputs that are hard and judges each number returned.",
        epilog="exit codes: 0 all contracts kept, 1 one broken, 2 wrong usage, or something could not be run",
        allow_abbrev=False,
    )
    verify.add_argument(
        "launcher",
        metavar="MODULE:LAUNCHER",
        nargs="?",
        help="a function of tensors that launches a kernel (default: the bundled kernels)",
    )
    verify.add_argument("--contract", metavar="NAME", help="what the launcher promises, such as quantize_1x128")
    verify.add_argument(
        "--option",
        metavar="NAME=VALUE",
        type=_option,
        action="append",
        default=[],
        help="an option of the contract, such as quotient=reciprocal",
    )
    verify.add_argument(
        "--mode",
        choices=("interpret", "compile"),
        action="append",
        help="interpret: run on the CPU and judge; compile: read the compiled code (default: both)",
    )
    verify.add_argument(
        "--target",
        metavar="TARGET",
        type=_target,
        action="append",
        help="what to compile for: sm_89, sm_90, sm_100, sm_120, gfx942, gfx950 (default: sm_90)",
    )
    verify.add_argument(
        "--faults", action="store_true", help="verify the verifier: kernels with planted faults, which it must catch"
    )
    verify.add_argument("--contracts", action="store_true", help="list the contracts with their launchers and options")
    verify.add_argument("--format", choices=("text", "json"), default="text", help="how to report (default: text)")
    verify.add_argument("--verbose", action="store_true", help="name each input that was tried")
    verify.set_defaults(run=_verify)


def _add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    audit = commands.add_parser(
        "audit",
        help="run a training script and report what one of its steps did with its dtypes",
        description="Runs a training script unchanged, audits one of its optimizer steps and stops it. Needs torch.",
        usage="precisionlint audit [OPTIONS] SCRIPT.py [ARGS...]\n"
        "       precisionlint audit [OPTIONS] -m MODULE [ARGS...]",
        epilog=AUDIT_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    audit.add_argument("--step", metavar="N", type=_step, default=2, help="which iteration to audit (default: 2)")
    audit.add_argument("--keep-running", action="store_true", help="let the script go on after that step")
    audit.add_argument("--format", choices=("text", "json"), default="text", help="how to report (default: text)")
    audit.add_argument("--out", metavar="FILE", help="write the report there instead of to standard output")
    audit.add_argument("--values", action="store_true", help="read every result, to name the first that is not finite")
    audit.add_argument("--all", action="store_true", help="list every op and place instead of groups")
    _add_color(audit)
    audit.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    audit.add_argument("script", metavar="SCRIPT.py", nargs="?", help="the script, which prints to standard error")
    audit.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")
    audit.set_defaults(run=_audit)


def _add_color(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set",
    )


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("names no rule")
    return words


def _assumption(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as use_amp=True or args.dtype=fp16")
    return name, value


def _target(text: str) -> str:
    from precisionlint.verify import TARGETS

    if text not in TARGETS:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(TARGETS)}")
    return text


def _option(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as scale=power-of-two")
    return name, value


def _check(options: argparse.Namespace) -> Outcome:
    select = catalogue.select(options.select, options.extend_select, options.ignore)
    if not select:
        raise UsageError("these options leave no rule to look for")
    if not any("check" in catalogue.find(name).found_by for name in select):
        raise UsageError("check finds none of these rules; `precisionlint rules` says what does")
    assume = dict(options.assume)
    for name, value in options.assume:
        if assume[name] != value:
            raise UsageError(f"--assume gives {name} two values, {value} and {assume[name]}")

    from precisionlint.check import check
    from precisionlint.report import json, text

    report = check(options.paths, select=select, assume=assume)
    for error in report.errors:
        print(text.error_line(error), file=sys.stderr)
    if not report.coverage.files and not report.errors:
        _complain(f"no Python files in {', '.join(options.paths)}")
    if options.format == "json":
        return Outcome(report.exit_code, [json.dumps(report)])
    color = _colored(options.color, sys.stdout)
    return Outcome(report.exit_code, text.render(report, color=color, verbose=options.verbose))


def _verify(options: argparse.Namespace) -> Outcome:
    from precisionlint.report import verified
    from precisionlint.verify import DEFAULT_MODES, describe_contracts, prove, verify

    if options.contracts:
        return Outcome(0, describe_contracts())
    progress = verified.progress_line(sys.stderr)
    if options.faults:
        proofs = prove(progress=progress)
        for error in proofs.errors:
            _complain(error)
        as_json = options.format == "json"
        return Outcome(proofs.exit_code, [verified.dumps(proofs)] if as_json else verified.render_proofs(proofs))
    if (options.launcher is None) != (options.contract is None):
        raise UsageError("a launcher needs --contract, and --contract a launcher; `verify --contracts` lists them")
    if options.option and options.launcher is None:
        raise UsageError("--option belongs to a launcher's contract; the bundled kernels declare their own")
    if options.launcher is not None and ":" not in options.launcher:
        raise UsageError(f"'{options.launcher}' is not MODULE:LAUNCHER, such as my_kernels:launch or kernels.py:launch")
    verification = verify(
        options.launcher,
        contract=options.contract,
        options=dict(options.option),
        modes=options.mode or DEFAULT_MODES,
        targets=options.target or ["sm_90"],
        progress=progress,
    )
    for error in verification.errors:
        _complain(error)
    if options.format == "json":
        return Outcome(verification.exit_code, [verified.dumps(verification)])
    return Outcome(verification.exit_code, verified.render(verification, verbose=options.verbose))


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not the number of a step, such as 2")
    return int(text)


def _audit(options: argparse.Namespace) -> Outcome:
    command = options.module if options.module is not None else [options.script, *options.arguments]
    if not command or command[0] is None:
        raise UsageError("audit needs a script, or -m and a module")
    if options.module is None and not os.path.isfile(command[0]):
        raise UsageError(f"{command[0]}: no such file")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise UsageError("audit needs torch: pip install 'precisionlint[audit]'")

    from precisionlint import audit_command
    from precisionlint.policy import PolicyError
    from precisionlint.trace.patches import UnsupportedTorchError

    try:
        audited = audit_command.run(
            command,
            module=options.module is not None,
            step=options.step,
            keep_running=options.keep_running,
            values=options.values,
        )
    except (PolicyError, UnsupportedTorchError) as error:
        raise UsageError(str(error)) from error
    color = options.out is None and _colored(options.color, sys.stdout)
    lines = audit_command.lines(audited, format=options.format, color=color, all=options.all)
    if options.out is None:
        return Outcome(audited.exit_code, lines)
    try:
        with open(options.out, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise UsageError(f"{options.out}: cannot be written: {error.strerror or error}") from error
    return Outcome(audited.exit_code, ())


def _rules(options: argparse.Namespace) -> Outcome:
    from precisionlint.report.page import listing

    return Outcome(0, listing(catalogue.load(), catalogue.select()))


def _explain(options: argparse.Namespace) -> Outcome:
    from shutil import get_terminal_size

    from precisionlint.report.page import page, styled

    text = page(catalogue.find(options.name))
    if _colored(options.color, sys.stdout):
        text = styled(text, width=min(get_terminal_size().columns, 120))
    return Outcome(0, text.splitlines())


def _colored(choice: str, stream: TextIO | None) -> bool:
    if choice != "auto":
        return choice == "always"
    quiet = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not quiet


def _complain(message: str) -> None:
    print(f"precisionlint: {message}", file=sys.stderr)


def _write(outcome: Outcome) -> int:
    """Prints an outcome; a reader that has had enough (`| head`) changes neither the exit code nor standard error."""
    try:
        for line in outcome.lines:
            print(line)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer has nowhere to go: without this, Python would complain again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _complain(f"cannot write the report: {(error.strerror or str(error)).lower()}")
            return 2
    return outcome.code
