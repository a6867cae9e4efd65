"""`precisionlint verify`: runs kernels against their contracts, each mode in a worker process of its own.

It knows how workers are started and what a run leaves unchecked; kernels, contracts and triton are known to the worker
alone. Nothing here imports torch or triton.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from precisionlint.errors import InputError
from precisionlint.kernels.outcome import (
    MODES,
    Compiled,
    Evidence,
    Measured,
    Mode,
    Multiplication,
    Outcome,
    Proof,
    Proofs,
    Tried,
    Verification,
    Violation,
)
from precisionlint.kernels.workers import LIMIT, answers

Progress = Callable[[str, str], None]
"""Told of each kernel and case before it runs."""

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""What the drivers of GPUs leave in the file system; where none is, torch need not be asked."""

TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
"""What the mode 'compile' can compile for."""

NOT_LOOKED_AT: Mapping[Mode, tuple[str, ...]] = {
    "interpret": (
        "the interpreter multiplies in fp32: the width of a tensor core's accumulator did not show in the results",
        "the interpreter runs one program after the other: races between programs did not show",
    ),
    "compile": ("only the launch for the first input was compiled, with its sizes and strides",),
    "native": ("natively, each input ran once: a race that shows rarely may not have shown",),
}


def verify(
    launcher: str | None = None,
    *,
    contract: str | None = None,
    options: Mapping[str, str] | None = None,
    modes: Sequence[Mode] | None = None,
    targets: Sequence[str] = ("sm_90",),
    kernels: Sequence[str] | None = None,
    deep: bool = False,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Verification:
    """Holds a launcher against a contract, all launchers of a module against those that they declare, or the bundled ones.

    `launcher` is MODULE:LAUNCHER, FILE.py:LAUNCHER, MODULE or FILE.py; without `contract`, what `precisionlint.contract`
    declared counts. `options` are the contract's, by name, and stand above declared ones; `targets` are those of the mode
    'compile' (TARGETS); `kernels` limits a run of the bundled ones to these names; `deep` draws inputs by hypothesis as
    well; `limit` is the seconds that one input may take. `modes` are all that can run here unless they are named. A
    launcher that cannot be loaded, dies or does not return, an unknown contract or option, and a named mode that cannot
    run here are errors of the result; the other launchers are verified all the same, and nothing raises.
    """
    if missing := _missing(deep):
        return Verification((), (), (missing,))
    outcomes: list[Outcome] = []
    errors: list[str] = []
    unchecked: list[str] = []
    compiled: list[Compiled] = []
    measured: list[tuple[int, Measured]] = []
    named = modes is not None
    ran = [mode for mode in modes or MODES if named or mode != "native" or any(map(os.path.exists, DRIVERS))]
    for mode in tuple(ran):
        request = {
            "mode": mode,
            "launcher": launcher,
            "contract": contract,
            "options": dict(options or {}),
            "kernels": None if kernels is None else list(kernels),
            "faults": False,
            "targets": list(targets),
            "deep": deep,
            "path": sys.path if launcher is not None else None,
        }
        placed: list[tuple[int, Outcome | Compiled]] = []
        before = len(measured)
        for message in answers(request, shared=launcher is None and mode != "native", limit=limit):
            if "case" in message and progress is not None:
                progress(message["kernel"], message["case"])
            elif "outcome" in message:
                placed.append((message["order"], _outcome(message["outcome"])))
            elif "compiled" in message:
                placed.append((message["order"], _compiled(message["compiled"])))
            elif "measured" in message:
                measured.append((message["order"], Measured(**message["measured"])))
            elif "absent" in message:
                errors += [message["absent"]] if named else []
            elif "error" in message and message["error"] not in errors:
                errors.append(message["error"])
        in_order = [each for _, each in sorted(placed, key=lambda pair: pair[0])]
        outcomes += [each for each in in_order if isinstance(each, Outcome)]
        compiled += [each for each in in_order if isinstance(each, Compiled)]
        if placed or len(measured) > before:
            unchecked += NOT_LOOKED_AT[mode]
        else:
            ran.remove(mode)
    if not deep and "interpret" in ran:
        unchecked.append("inputs beyond the fixed corpus: --deep draws more")
    unchecked += [f"no launcher ran in the mode {mode}" for mode in MODES if mode not in ran and mode != "native"]
    if "native" not in ran:
        unchecked.append("nothing ran on a GPU: neither its arithmetic nor its speed was looked at")
    figures = tuple(each for _, each in sorted(measured, key=lambda pair: pair[0]))
    return Verification(tuple(outcomes), tuple(unchecked), tuple(errors), tuple(compiled), figures)


def prove(*, kernels: Sequence[str] | None = None, limit: float = LIMIT, progress: Progress | None = None) -> Proofs:
    """Verifies the verifier: kernels with planted faults must be caught, correct ones in other styles must not.

    `kernels` limits the run to planted kernels of these names, `limit` is the seconds that one may take. Runs in the
    interpreter.
    """
    if missing := _missing():
        return Proofs((), (missing,))
    proofs: list[tuple[int, Proof]] = []
    errors: list[str] = []
    names = None if kernels is None else list(kernels)
    for message in answers({"mode": "interpret", "faults": True, "kernels": names}, shared=True, limit=limit):
        if "case" in message and progress is not None:
            progress(message["kernel"], message["case"])
        elif "proof" in message:
            proof = Proof(**{**message["proof"], "caught_by": tuple(message["proof"]["caught_by"])})
            proofs.append((message["order"], proof))
        elif "error" in message:
            errors.append(message["error"])
    return Proofs(tuple(proof for _, proof in sorted(proofs, key=lambda pair: pair[0])), tuple(errors))


def _missing(deep: bool = False) -> str:
    needed = ("torch", "triton", "hypothesis") if deep else ("torch", "triton")
    missing = [name for name in needed if find_spec(name) is None]
    if "triton" in missing and sys.platform != "linux":
        return f"verify needs triton, which is published for Linux alone, and this is {sys.platform}"
    return f"verify needs {' and '.join(missing)}: pip install 'precisionlint[verify]'" if missing else ""


def describe_contracts() -> Iterator[str]:
    """Every contract: the launcher's form, an example, the options with their words, the default first."""
    if missing := _missing():
        raise InputError(missing)
    from precisionlint.kernels.contracts import CONTRACTS

    for contract in CONTRACTS.values():
        yield contract.name
        yield f"  {contract.form}"
        yield from (f"      {line}" for line in contract.example.splitlines())
        for option in contract.options:
            words = " | ".join((*option.words, *(["a number"] if option.number else [])))
            yield f"  --option {option.name}={words}: {option.meaning}"
        yield ""


def _compiled(fields: dict[str, Any]) -> Compiled:
    return Compiled(
        **{
            **fields,
            "products": tuple(Multiplication(**each) for each in fields["products"]),
            "evidence": tuple(Evidence(**each) for each in fields["evidence"]),
            "divisions": tuple((name, count) for name, count in fields["divisions"]),
        }
    )


def _outcome(fields: dict[str, Any]) -> Outcome:
    tried = [
        Tried(
            each["case"],
            tuple(Violation(**{**clause, "index": tuple(clause["index"])}) for clause in each["violations"]),
            each["seconds"],
            tuple(each["leave_out"]),
        )
        for each in fields["tried"]
    ]
    return Outcome(**{**fields, "tried": tuple(tried)})
