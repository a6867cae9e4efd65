"""The process in which kernels run: reads one request from standard input, writes what it finds line by line.

`python -m precisionlint.kernels.worker` is started by `verify` and by nobody else. A request is a line and each line of
the answer another, all JSON objects: 'ready' once torch and triton are loaded, 'case' before each input, what was found,
and 'done'. The answer leaves through the original standard output; what kernels print goes to standard error, and they
read nothing. The worker ends when its standard input does: then nobody listens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, TextIO

from msgspec import to_builtins

from precisionlint.kernels.launchers import LauncherError, check_form, declared, find
from precisionlint.kernels.outcome import Outcome, Proof, Tried


class _DeviceLostError(Exception):
    """The GPU is lost to this process; another one can go on with the next kernel."""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who listens
    requests = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # about a default of triton's next version
    warnings.filterwarnings("ignore", message="All-NaN slice")  # the interpreter's own way to a maximum without NaN
    request = json.loads(requests.readline())
    threading.Thread(target=_end_with, args=(requests,), daemon=True).start()
    sys.path[:] = request.get("path") or sys.path
    if request["mode"] == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        _verify(request, answers)
    except LauncherError as error:
        _say(answers, {"error": str(error)})
    except _DeviceLostError:
        _say(answers, {"lost": True})
        return 0
    _say(answers, {"done": True})
    return 0


def _end_with(requests: TextIO) -> None:
    """Ends the process when nobody is left who would read its answers."""
    requests.read()
    os._exit(1)


def _verify(request: dict[str, Any], answers: TextIO) -> None:
    import torch

    from precisionlint.kernels.contracts import ContractError
    from precisionlint.kernels.interpreter import UnsupportedTritonError, load_interpreter, repaired

    with ExitStack() as exact:
        if request["mode"] == "interpret":
            torch.set_num_threads(1)  # the tensors are small: threads that wait for a core cost more than they save
            try:
                exact.enter_context(repaired(load_interpreter()))
            except UnsupportedTritonError as error:
                _say(answers, {"error": str(error)})
                return
        _say(answers, {"ready": True})
        if request["faults"]:
            _prove(request, answers)
            return
        if request["mode"] == "native" and (missing := _no_gpu()):
            _say(answers, {"absent": missing})
            return
        verify_one = {"compile": _compile, "interpret": _one, "native": _native}[request["mode"]]
        for order, subject in _share(list(_subjects(request)), request):
            try:
                verify_one(subject, request, order, answers)
            except LauncherError as error:
                _say(answers, {"error": str(error)})
            except ContractError as error:
                _say(answers, {"error": f"{subject.name}: {error}"})


def _share(everything: list[Any], request: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """What of a run is this worker's and still to do, each with its place in the whole."""
    index, count = request["share"]
    yield from (placed for placed in list(enumerate(everything))[index::count] if placed[0] > request["after"])


def _subjects(request: dict[str, Any]) -> Iterator[Any]:
    from precisionlint.kernels.bundled import Subject, subjects

    if request["launcher"] is None:
        wanted = request["kernels"]
        yield from (subject for subject in subjects() if wanted is None or subject.name in wanted)
        return
    for name, launch in find(request["launcher"]):
        if request["contract"] is not None:
            yield Subject(name, launch, request["contract"], request["options"])
            continue
        promises = declared(launch)
        if not promises:
            raise LauncherError(
                f"{name} declares no contract: pass --contract NAME, or put @precisionlint.contract(NAME) on it; "
                "`precisionlint verify --contracts` lists them"
            )
        for promise in promises:
            own = name if len(promises) == 1 else f"{name} ({promise.contract})"
            yield Subject(own, launch, promise.contract, {**promise.options, **request["options"]})


def _one(subject: Any, request: dict[str, Any], order: int, answers: TextIO) -> None:
    from precisionlint.kernels import contracts
    from precisionlint.kernels.interpreter import RefusedError
    from precisionlint.kernels.run import only_raises, place_of, try_case

    contract = contracts.find(subject.contract)
    options = contract.resolve(subject.options)
    tried: list[Tried] = []
    refused = ""
    check_form(subject.name, subject.launch, next(contract.cases(options)).make(), contract.form, contract.example)
    for case in contract.cases(options):
        _say(answers, {"order": order, "kernel": subject.name, "case": case.name})
        try:
            tried.append(try_case(subject.launch, contract, case, options))
        except RefusedError as error:
            refused = str(error)
            break
    if not refused and (raised := only_raises(tried)):
        refused = f"it raises on each of {len(tried)} inputs, which lie on the CPU here: {raised}"
        tried = []
    if request["deep"] and not refused:
        from precisionlint.kernels.deep import search

        def tell(case: str) -> None:
            _say(answers, {"order": order, "kernel": subject.name, "case": case})

        tried.append(search(subject.launch, contract, options, tell))
    path, line = place_of(subject.launch)
    outcome = Outcome(subject.name, contract.name, request["mode"], path, line, tuple(tried), refused)
    _say(answers, {"outcome": to_builtins(outcome), "order": order})


def _no_gpu() -> str:
    from precisionlint.kernels.native import absent

    return absent()


def _native(subject: Any, request: dict[str, Any], order: int, answers: TextIO) -> None:
    from precisionlint.kernels import contracts, native
    from precisionlint.kernels.run import named, place_of, try_case

    contract = contracts.find(subject.contract)
    options = native.options_here(contract, subject.options)
    tried: list[Tried] = []
    check_form(subject.name, subject.launch, next(contract.cases(options)).make(), contract.form, contract.example)
    for case in contract.cases(options):
        _say(answers, {"order": order, "kernel": subject.name, "case": case.name})
        tried.append(try_case(subject.launch, contract, case, options, device="cuda"))
        if any(native.lost(broken.got) for broken in tried[-1].violations):
            break
    path, line = place_of(subject.launch)
    outcome = Outcome(subject.name, contract.name, request["mode"], path, line, tuple(tried))
    _say(answers, {"outcome": to_builtins(outcome), "order": order})
    if not outcome.sound:
        if any(native.lost(broken.got) for broken in tried[-1].violations):
            raise _DeviceLostError
        return
    _say(answers, {"order": order, "kernel": subject.name, "case": "probes and speed"})
    try:
        for measured in native.probe(subject.name, subject.launch, contract, options, "cuda"):
            _say(answers, {"measured": to_builtins(measured), "order": order})
        for measured in native.speeds(subject.name, subject.launch, contract, options):
            _say(answers, {"measured": to_builtins(measured), "order": order})
    except Exception as error:  # such as no memory left: what the contract said stands
        text = named(error)
        _say(answers, {"error": f"{subject.name}: its speed could not be measured: {text}"})
        if native.lost(text):
            raise _DeviceLostError from error


def _compile(subject: Any, request: dict[str, Any], order: int, answers: TextIO) -> None:
    from precisionlint.kernels import contracts
    from precisionlint.kernels.compiled import compile_for, launches
    from precisionlint.kernels.run import named

    contract = contracts.find(subject.contract)
    inputs = next(contract.cases(contract.resolve(subject.options))).make()
    check_form(subject.name, subject.launch, inputs, contract.form, contract.example)
    try:
        caught = launches(subject.launch, inputs)
    except BaseException as error:  # whatever a launcher raises, sys.exit among it
        _say(answers, {"error": f"{subject.name}: raised before it launched a kernel: {named(error)}"})
        return
    if not caught:
        _say(answers, {"error": f"{subject.name}: launches no Triton kernel"})
    for target in request["targets"]:
        for launch in caught:
            _say(answers, {"order": order, "kernel": subject.name, "case": f"{launch.function.__name__} for {target}"})
            built = compile_for(launch, target)
            _say(answers, {"compiled": {**to_builtins(built), "launcher": subject.name}, "order": order})


def _prove(request: dict[str, Any], answers: TextIO) -> None:
    from precisionlint.kernels import contracts
    from precisionlint.kernels.planted import planted
    from precisionlint.kernels.run import RAISES, try_case

    names = request["kernels"]
    wanted = [kernel for kernel in planted() if names is None or kernel.name in names]
    for order, kernel in _share(wanted, request):
        contract = contracts.find(kernel.contract)
        options = contract.resolve(dict(kernel.options))
        _say(answers, {"order": order, "kernel": kernel.name, "case": kernel.fault or "no fault"})
        tried = [try_case(kernel.launch, contract, case, options) for case in contract.cases(options)]
        # A launcher that raises proves nothing: only results that were judged count.
        caught = tuple(
            each.case for each in tried if any(broken.clause not in (RAISES, "returns") for broken in each.violations)
        )
        seconds = sum(each.seconds for each in tried)
        proof = Proof(kernel.name, contract.name, kernel.fault, caught, len(tried), seconds)
        _say(answers, {"proof": to_builtins(proof), "order": order})


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
