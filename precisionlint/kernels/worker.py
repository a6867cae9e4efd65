"""The process in which kernels run: reads one request from standard input, writes what it finds line by line.

`python -m precisionlint.kernels.worker` is started by `verify` and by nobody else. A request and each line of the
answer is a JSON object. The answer leaves through the original standard output; what kernels print goes to standard
error.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from precisionlint.kernels.outcome import Outcome, Proof, Tried


class LauncherError(Exception):
    """A launcher cannot be loaded; the text is one line that says why."""


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # about a default of triton's next version
    warnings.filterwarnings("ignore", message="All-NaN slice")  # the interpreter's own way to a maximum without NaN
    request = json.load(sys.stdin)
    if request["mode"] == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        _verify(request, answers)
    except Exception as error:
        from precisionlint.kernels.contracts import ContractError
        from precisionlint.kernels.interpreter import UnsupportedTritonError

        if not isinstance(error, (LauncherError, ContractError, UnsupportedTritonError)):
            raise
        _say(answers, {"error": str(error)})
    return 0


def _verify(request: dict[str, Any], answers: TextIO) -> None:
    import torch

    from precisionlint.kernels.interpreter import load_interpreter, repaired

    exact: AbstractContextManager[None] = nullcontext()
    if request["mode"] == "interpret":
        exact = repaired(load_interpreter())
        torch.set_num_threads(1)  # the tensors are small: threads that wait for a core cost more than they save
    with exact:
        if request["faults"]:
            _prove(request["kernels"], answers)
        else:
            verify_one = _compile if request["mode"] == "compile" else _one
            for subject in _subjects(request):
                verify_one(subject, request, answers)


def _subjects(request: dict[str, Any]) -> Iterator[Any]:
    from precisionlint.kernels.bundled import Subject, subjects

    if request["launcher"] is None:
        wanted = request["kernels"]
        yield from (subject for subject in subjects() if wanted is None or subject.name in wanted)
    else:
        yield Subject(request["launcher"], load(request["launcher"]), request["contract"], request["options"])


def _one(subject: Any, request: dict[str, Any], answers: TextIO) -> None:
    from precisionlint.kernels import contracts
    from precisionlint.kernels.interpreter import RefusedError
    from precisionlint.kernels.run import place_of, try_case

    contract = contracts.find(subject.contract)
    options = contract.resolve(subject.options)
    tried: list[Tried] = []
    refused = ""
    for case in contract.cases(options):
        _say(answers, {"kernel": subject.name, "case": case.name})
        try:
            tried.append(try_case(subject.launch, contract, case, options))
        except RefusedError as error:
            refused = str(error)
            break
    path, line = place_of(subject.launch)
    outcome = Outcome(subject.name, contract.name, request["mode"], path, line, tuple(tried), refused)
    _say(answers, {"outcome": asdict(outcome)})


def _compile(subject: Any, request: dict[str, Any], answers: TextIO) -> None:
    from precisionlint.kernels import contracts
    from precisionlint.kernels.compiled import compile_for, launches

    contract = contracts.find(subject.contract)
    case = next(contract.cases(contract.resolve(subject.options)))
    try:
        caught = launches(subject.launch, case.make())
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        _say(answers, {"error": f"{subject.name}: raised before it launched a kernel: {text}"})
        return
    if not caught:
        _say(answers, {"error": f"{subject.name}: launches no Triton kernel"})
    for target in request["targets"]:
        for launch in caught:
            _say(answers, {"kernel": subject.name, "case": f"{launch.function.__name__} for {target}"})
            built = compile_for(launch, target)
            _say(answers, {"compiled": {**asdict(built), "launcher": subject.name}})


def _prove(names: list[str] | None, answers: TextIO) -> None:
    from precisionlint.kernels import contracts
    from precisionlint.kernels.planted import planted
    from precisionlint.kernels.run import try_case

    for kernel in planted():
        if names is not None and kernel.name not in names:
            continue
        contract = contracts.find(kernel.contract)
        options = contract.resolve(dict(kernel.options))
        _say(answers, {"kernel": kernel.name, "case": kernel.fault or "no fault"})
        tried = [try_case(kernel.launch, contract, case, options) for case in contract.cases(options)]
        # A launcher that raises proves nothing: only results that were judged count.
        caught = tuple(each.case for each in tried if any(broken.clause != "returns" for broken in each.violations))
        seconds = sum(each.seconds for each in tried)
        proof = Proof(kernel.name, contract.name, kernel.fault, caught, len(tried), seconds)
        _say(answers, {"proof": asdict(proof)})


def load(spec: str) -> Callable[..., Any]:
    """The function that MODULE:LAUNCHER or FILE.py:LAUNCHER names; raises LauncherError."""
    place, _, name = spec.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise LauncherError(f"cannot load {spec}: {type(error).__name__}: {error}") from error
    if not callable(found) or hasattr(found, "arg_names"):
        kind = "a Triton kernel" if hasattr(found, "arg_names") else "no function"
        raise LauncherError(
            f"{spec} is {kind}; a launcher is a Python function of tensors that allocates the outputs, "
            "launches the kernel and returns them"
        )
    function: Callable[..., Any] = found
    return function


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
