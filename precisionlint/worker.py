"""A process that reads files for another: tasks come in by standard input, what was read goes out by standard output.

It is started by ``pool`` as a program of its own, so that it needs nothing of the module that the other process runs as its main one.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import BinaryIO

from precisionlint.memory import uncollected
from precisionlint.reader import Looked, Plan, Reader, Reading, with_deep_stack

Task = tuple[Plan, list[tuple[str, str]]]
"""A plan and files: (name as the user gave it, path)."""
Answer = tuple[list[Reading], dict[Path, Looked]]


def main() -> None:
    """Answers tasks until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not print into the answers
    with uncollected():
        with_deep_stack(lambda: _serve(sys.stdin.buffer, answers))


def _serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    readers: dict[Plan, Reader] = {}
    while True:
        try:
            task: Task = pickle.load(tasks)
        except EOFError:
            return
        plan, files = task
        reader = readers.setdefault(plan, Reader(plan))
        answer: Answer = ([reader.read(display, Path(path)) for display, path in files], reader.taken())
        pickle.dump(answer, answers)
        answers.flush()
