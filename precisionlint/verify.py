"""`precisionlint verify`: runs kernels against their contracts, each mode in a worker process of its own.

It knows how workers are started and what a run leaves unchecked; kernels, contracts and triton are known to the worker
alone. Nothing here imports torch or triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from precisionlint.kernels.outcome import (
    MODES,
    Compiled,
    Evidence,
    Mode,
    Multiplication,
    Outcome,
    Proof,
    Proofs,
    Tried,
    Verification,
    Violation,
)

Progress = Callable[[str, str], None]
"""Told of each kernel and case before it runs."""

DEFAULT_MODES: tuple[Mode, ...] = MODES

TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
"""What the mode 'compile' can compile for."""

NOT_LOOKED_AT: Mapping[Mode, tuple[str, ...]] = {
    "interpret": (
        "the interpreter multiplies in fp32: the width of a tensor core's accumulator did not show in the results",
        "the interpreter runs one program after the other: races between programs did not show",
    ),
    "compile": ("only the launch for the first input was compiled, with its sizes and strides",),
}


def verify(
    launcher: str | None = None,
    *,
    contract: str | None = None,
    options: Mapping[str, str] | None = None,
    modes: Sequence[Mode] = DEFAULT_MODES,
    targets: Sequence[str] = ("sm_90",),
    kernels: Sequence[str] | None = None,
    deep: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Holds a launcher against a contract, all launchers of a module against those that they declare, or the bundled ones.

    `launcher` is MODULE:LAUNCHER, FILE.py:LAUNCHER, MODULE or FILE.py; without `contract`, what `precisionlint.contract`
    declared counts. `options` are the contract's, by name, and stand above declared ones; `targets` are those of the mode
    'compile' (TARGETS); `kernels` limits a run of the bundled ones to these names; `deep` draws inputs by hypothesis as
    well. A launcher that cannot be loaded, an unknown contract or option, and a worker that dies are errors of the
    result; nothing raises.
    """
    if missing := _missing(deep):
        return Verification((), (), (missing,))
    outcomes: list[Outcome] = []
    errors: list[str] = []
    unchecked: list[str] = []
    compiled: list[Compiled] = []
    for mode in modes:
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
        for message in _answers(request):
            if "case" in message and progress is not None:
                progress(message["kernel"], message["case"])
            elif "outcome" in message:
                outcomes.append(_outcome(message["outcome"]))
            elif "compiled" in message:
                compiled.append(_compiled(message["compiled"]))
            elif "error" in message and message["error"] not in errors:
                errors.append(message["error"])
        unchecked += NOT_LOOKED_AT[mode]
    if not deep and "interpret" in modes:
        unchecked.append("inputs beyond the fixed corpus: --deep draws more")
    unchecked += [f"no launcher ran in the mode {mode}" for mode in MODES if mode not in modes]
    unchecked.append("nothing ran on a GPU: neither its arithmetic nor its speed was looked at")
    return Verification(tuple(outcomes), tuple(unchecked), tuple(errors), tuple(compiled))


def prove(*, kernels: Sequence[str] | None = None, progress: Progress | None = None) -> Proofs:
    """Verifies the verifier: kernels with planted faults must be caught, correct ones in other styles must not.

    `kernels` limits the run to planted kernels of these names. Runs in the interpreter.
    """
    if missing := _missing():
        return Proofs((), (missing,))
    proofs: list[Proof] = []
    errors: list[str] = []
    names = None if kernels is None else list(kernels)
    for message in _answers({"mode": "interpret", "faults": True, "kernels": names}):
        if "case" in message and progress is not None:
            progress(message["kernel"], message["case"])
        elif "proof" in message:
            proofs.append(Proof(**{**message["proof"], "caught_by": tuple(message["proof"]["caught_by"])}))
        elif "error" in message:
            errors.append(message["error"])
    return Proofs(tuple(proofs), tuple(errors))


def _missing(deep: bool = False) -> str:
    needed = ("torch", "triton", "hypothesis") if deep else ("torch", "triton")
    missing = [name for name in needed if find_spec(name) is None]
    return f"verify needs {' and '.join(missing)}: pip install 'precisionlint[verify]'" if missing else ""


def describe_contracts() -> Iterator[str]:
    """Every contract: the launcher's form, an example, the options with their words, the default first."""
    from precisionlint.kernels.contracts import CONTRACTS

    for contract in CONTRACTS.values():
        yield contract.name
        yield f"  {contract.form}"
        yield from (f"      {line}" for line in contract.example.splitlines())
        for option in contract.options:
            words = " | ".join((*option.words, *(["a number"] if option.number else [])))
            yield f"  --option {option.name}={words}: {option.meaning}"
        yield ""


def _answers(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a worker says, message by message; a worker that dies says so as an error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if request["mode"] == "interpret":
        environment |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "precisionlint.kernels.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        with worker.stdin:
            json.dump(request, worker.stdin)
        last = ""
        for line in worker.stdout:
            message = json.loads(line)
            if "case" in message:
                last = f", at {message['kernel']}, {message['case']}"
            yield message
        code = worker.wait()
    if code:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        yield {"error": f"the process that runs the kernels {how}{last}"}


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
        )
        for each in fields["tried"]
    ]
    return Outcome(**{**fields, "tried": tuple(tried)})
