"""A verification as text for people and as JSON for programs.

It knows `kernels.outcome` and what findings look like, not how anything was verified.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from msgspec import to_builtins

from precisionlint.kernels.outcome import Compiled, Measured, Outcome, Proofs, Tried, Verification

SCHEMA = 1
RULE = "kernel-breaks-contract"


def render(verification: Verification, *, verbose: bool = False) -> Iterator[str]:
    """The report's lines, without the errors, which belong on another stream."""
    for outcome in verification.outcomes:
        yield from _outcome(outcome, verbose)
    for lines, launchers in _alike(verification.compiled).items():
        yield from lines
        yield f"  launched by {', '.join(launchers)}"
    for each in verification.measured:
        yield measured(each)
    broken = sum(not outcome.sound for outcome in verification.outcomes)
    refused = sum(bool(outcome.refused) for outcome in verification.outcomes)
    if verification.outcomes:
        kept = len(verification.outcomes) - broken - refused
        yield f"{kept} kept to their contract, {broken} broke it, {refused} could not be judged"
    if verification.compiled:
        failed = sum(bool(built.failed) for built in verification.compiled)
        evidence = sum(len(built.evidence) for built in verification.compiled)
        yield f"{len(verification.compiled) - failed} compiled, {failed} did not; {evidence} findings in compiled code"
    for sentence in verification.unchecked:
        yield f"not checked: {sentence}"


def measured(each: Measured) -> str:
    """A line for one measurement on a GPU."""
    return f"{each.kernel}: {each.what}: {each.got}; {each.against}"


def render_proofs(proofs: Proofs) -> Iterator[str]:
    """One line a planted kernel: how many inputs caught it, and what is wrong with it."""
    for proof in proofs.proofs:
        caught = f"{len(proof.caught_by)} of {proof.inputs} inputs"
        verdict = "caught by" if proof.fault else "false alarm on" if proof.caught_by else "kept on"
        if not proof.fault and not proof.caught_by:
            caught = f"{proof.inputs} inputs"
        mark = "" if proof.right else "WRONG: "
        yield f"{mark}{proof.kernel}: {verdict} {caught}{f': {proof.fault}' if proof.fault else ''}"
    faults = [proof for proof in proofs.proofs if proof.fault]
    alarms = sum(not proof.right for proof in proofs.proofs if not proof.fault)
    caught_faults = sum(proof.right for proof in faults)
    yield f"{caught_faults} of {len(faults)} planted faults caught; {alarms} false alarms on correct kernels"


def dumps(result: Verification | Proofs) -> str:
    """A verification, or that of the verifier, as one JSON object in ASCII."""
    return json.dumps({"schema": SCHEMA, "rule": RULE, **to_builtins(result)}, indent=2)


def progress_line(stream: TextIO) -> Callable[[str, str], None]:
    """A function that keeps one line of a terminal at the kernel and input that run; elsewhere it writes nothing."""

    def show(kernel: str, case: str) -> None:
        if stream.isatty():
            print(f"\r\x1b[K{kernel}: {case}"[:100], end="", file=stream, flush=True)

    return show


def _alike(compiled: Sequence[Compiled]) -> Mapping[tuple[str, ...], list[str]]:
    """What is said of compiled kernels, each text once, with the launchers of which it is said."""
    found: dict[tuple[str, ...], list[str]] = {}
    for built in compiled:
        found.setdefault(tuple(_compiled(built)), []).append(built.launcher)
    return found


def _compiled(built: Compiled) -> Iterator[str]:
    what = f"{built.kernel} for {built.target}"
    if built.failed:
        yield f"{what}: does not compile: {built.failed}"
        return
    for each in built.evidence:
        yield f"{each.path}:{each.line}: {each.severity} {each.rule}: {what}: {each.message}"
    unit = "registers" if built.target.startswith("gfx") else "bytes"
    yield (
        f"{what}: {_known(built.registers)} registers, {_known(built.spills)} {unit} spilled, "
        f"{_known(built.shared)} bytes of shared memory"
    )
    for product in built.products:
        place = f"{product.path}:{product.line}" if product.line else "somewhere"
        yield f"  {place}: {product.a} x {product.b} -> {product.result}, promoted to fp32: {product.promotion}"
    if built.divisions:
        yield f"  divides with {', '.join(f'{name} ({count})' for name, count in built.divisions)}"


def _known(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _outcome(outcome: Outcome, verbose: bool) -> Iterator[str]:
    where = f"{outcome.path}:{outcome.line}: " if outcome.path else ""
    what = f"{outcome.kernel} against {outcome.contract} ({outcome.mode})"
    if outcome.refused:
        yield f"{where}{what}: could not be judged: {outcome.refused}"
        return
    seconds = sum(tried.seconds for tried in outcome.tried)
    broken = [tried for tried in outcome.tried if tried.violations]
    if not broken:
        yield f"{where}{what}: kept on {len(outcome.tried)} inputs ({seconds:.1f} s)"
    else:
        yield f"{where}error {RULE}: {what}: broken on {len(broken)} of {len(outcome.tried)} inputs ({seconds:.1f} s)"
    for tried in outcome.tried:
        if tried.violations:
            yield from _tried(tried)
        elif verbose:
            yield f"  kept: {tried.case} ({tried.seconds:.2f} s)"
    if broken and all(tried.leave_out for tried in broken):
        each = [set(tried.leave_out) for tried in broken]
        enough = set.intersection(*each)
        options = " or ".join(sorted(enough)) if enough else " and ".join(sorted(set.union(*each)))
        yield f"  not broken on other inputs: a launcher that is not made for these declares {options}"


def _tried(tried: Tried) -> Iterator[str]:
    for violation in tried.violations:
        place = f" at {list(violation.index)}" if violation.index else ""
        share = f" in {violation.count} of {violation.of}" if violation.of > 1 else ""
        worst = f"; the worst is off by {violation.excess}" if violation.excess else ""
        yield f"  {tried.case}: {violation.clause}{share}:"
        yield f"    got {violation.got}{place}, allowed {violation.allowed}{worst}"
        if violation.hint:
            yield f"    {violation.hint}"
