"""A verification as text for people and as JSON for programs.

It knows `kernels.outcome` and what findings look like, not how anything was verified.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TextIO

from precisionlint.kernels.outcome import Outcome, Proofs, Tried, Verification

SCHEMA = 1
RULE = "kernel-breaks-contract"


def render(verification: Verification, *, verbose: bool = False) -> Iterator[str]:
    """The report's lines, without the errors, which belong on another stream."""
    for outcome in verification.outcomes:
        yield from _outcome(outcome, verbose)
    broken = sum(not outcome.sound for outcome in verification.outcomes)
    refused = sum(bool(outcome.refused) for outcome in verification.outcomes)
    kept = len(verification.outcomes) - broken - refused
    yield f"{kept} kept to their contract, {broken} broke it, {refused} could not be judged"
    for sentence in verification.unchecked:
        yield f"not checked: {sentence}"


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
    return json.dumps({"schema": SCHEMA, "rule": RULE, **asdict(result)}, indent=2)


def progress_line(stream: TextIO) -> Callable[[str, str], None]:
    """A function that keeps one line of a terminal at the kernel and input that run; elsewhere it writes nothing."""

    def show(kernel: str, case: str) -> None:
        if stream.isatty():
            print(f"\r\x1b[K{kernel}: {case}"[:100], end="", file=stream, flush=True)

    return show


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


def _tried(tried: Tried) -> Iterator[str]:
    for violation in tried.violations:
        place = f" at {list(violation.index)}" if violation.index else ""
        share = f" in {violation.count} of {violation.of}" if violation.of > 1 else ""
        worst = f"; the worst is off by {violation.excess}" if violation.excess else ""
        yield f"  {tried.case}: {violation.clause}{share}:"
        yield f"    got {violation.got}{place}, allowed {violation.allowed}{worst}"
