"""``precisionlint verify``: its options, and what it makes of them."""

from __future__ import annotations

import argparse
import sys

from precisionlint.commands.common import Outcome, UsageError, complain


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="hold Triton FP8 kernels against reference numerics",
        description="Runs a launcher, or the bundled kernels, on inputs that are hard and judges each number returned.",
        epilog="exit codes: 0 all contracts kept, 1 one broken, 2 wrong usage, or a kernel could not be run or judged",
        allow_abbrev=False,
    )
    verify.add_argument(
        "launcher",
        metavar="MODULE[:LAUNCHER]",
        nargs="?",
        help="a function of tensors that launches a kernel, or a module or file with functions that declare their "
        "contracts (default: the bundled kernels)",
    )
    verify.add_argument(
        "--contract",
        metavar="NAME",
        help="what the launcher promises, such as quantize_1x128 (default: what it declares)",
    )
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
        choices=("interpret", "compile", "native"),
        action="append",
        help="interpret: run on the CPU and judge; compile: read the compiled code; native: run, probe and time on the GPU "
        "(default: all that can run here)",
    )
    verify.add_argument(
        "--target",
        metavar="TARGET",
        type=_target,
        action="append",
        help="what to compile for: sm_89, sm_90, sm_100, sm_120, gfx942, gfx950 (default: sm_90)",
    )
    verify.add_argument(
        "--deep",
        action="store_true",
        help="draw inputs by hypothesis as well, and shrink one that breaks a contract",
    )
    verify.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=300.0,
        help="how long one input, or one compilation, may take (default: 300)",
    )
    verify.add_argument(
        "--faults", action="store_true", help="verify the verifier: kernels with planted faults, which it must catch"
    )
    verify.add_argument("--contracts", action="store_true", help="list the contracts with their launchers and options")
    verify.add_argument("--format", choices=("text", "json"), default="text", help="how to report (default: text)")
    verify.add_argument("--verbose", action="store_true", help="name each input that was tried")
    verify.set_defaults(run=run)


def _target(text: str) -> str:
    from precisionlint.verify import TARGETS

    if text not in TARGETS:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(TARGETS)}")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds")
    return seconds


def _option(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as scale=power-of-two")
    return name, value


def run(options: argparse.Namespace) -> Outcome:
    from precisionlint.report import verified
    from precisionlint.verify import describe_contracts, prove, verify

    if options.contracts:
        return Outcome(0, describe_contracts())
    progress = verified.progress_line(sys.stderr)
    if options.faults:
        proofs = prove(limit=options.timeout, progress=progress)
        for error in proofs.errors:
            complain(error)
        if options.format == "json":
            return Outcome(proofs.exit_code, [verified.dumps(proofs)])
        return Outcome(proofs.exit_code, verified.render_proofs(proofs) if proofs.proofs else [])
    if options.contract is not None and options.launcher is None:
        raise UsageError("--contract needs a launcher, such as my_kernels:launch")
    if options.option and options.launcher is None:
        raise UsageError("--option belongs to a launcher's contract; the bundled kernels declare their own")
    if options.contract is not None and ":" not in options.launcher:
        raise UsageError(f"'{options.launcher}' is not MODULE:LAUNCHER, such as my_kernels:launch or kernels.py:launch")
    verification = verify(
        options.launcher,
        contract=options.contract,
        options=dict(options.option),
        modes=options.mode,
        targets=options.target or ["sm_90"],
        deep=options.deep,
        limit=options.timeout,
        progress=progress,
    )
    for error in verification.errors:
        complain(error)
    if options.format == "json":
        return Outcome(verification.exit_code, [verified.dumps(verification)])
    return Outcome(verification.exit_code, verified.render(verification, verbose=options.verbose))
