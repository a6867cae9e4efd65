"""Reads files in several processes: the same results as in one, in whatever order they come.

The processes are sessions of their own: an interrupt from the terminal reaches this one alone, which ends them. One that dies (a
parser can be brought down by a file) costs the file that it died of, and no other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from precisionlint.findings import FileError
from precisionlint.reader import FileResult, Reading
from precisionlint.worker import Answer, Task

START = "import sys; sys.path[:] = {path!r}; from precisionlint.worker import main; main()"
FILES = 16
"""At most so many files are a task: few enough to keep all processes busy to the end."""


def tasks_of(tasks: Sequence[Task], jobs: int) -> list[Task]:
    """The same files in tasks small enough for so many processes; neighbours, who share imports, stay together."""
    total = sum(len(files) for _, files in tasks)
    size = max(1, min(FILES, total // (jobs * 4)))
    return [(plan, files[at : at + size]) for plan, files in tasks for at in range(0, len(files), size)]


def read(tasks: Sequence[Task], jobs: int) -> Iterator[Answer]:
    """The answers to tasks, from so many processes."""
    waiting = deque(tasks)
    answers: queue.Queue[Answer | BaseException] = queue.Queue()
    lock = threading.Lock()
    workers = [_Worker(waiting, answers, lock) for _ in range(jobs)]
    left = sum(len(files) for _, files in tasks)
    try:
        for worker in workers:
            worker.start()
        while left:
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            left -= len(answer[0])
            yield answer
    finally:
        for worker in workers:
            worker.end()


class _Worker(threading.Thread):
    """Hands tasks to one process, and starts another where that one dies."""

    def __init__(
        self, waiting: deque[Task], answers: queue.Queue[Answer | BaseException], lock: threading.Lock
    ) -> None:
        super().__init__(name="precisionlint-worker", daemon=True)
        self._waiting, self._answers, self._lock = waiting, answers, lock
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def run(self) -> None:
        try:
            while (task := self._next()) is not None:
                try:
                    self._answers.put(self._ask(task))
                except (OSError, EOFError, pickle.UnpicklingError):
                    self._died(task)
        except BaseException as error:  # told where the answers are awaited
            self._answers.put(error)

    def _next(self) -> Task | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting and not self._ended else None

    def _ask(self, task: Task) -> Answer:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        answer: Answer = pickle.load(process.stdout)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        more: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {"creationflags": 0x200}
        command = [sys.executable, "-c", START.format(path=sys.path)]
        with self._lock:
            if self._ended:
                raise EOFError
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)
            self._process = process
        return process

    def _died(self, task: Task) -> None:
        """Reads the files of a task one by one, if there were several; else says of which file the process died."""
        self._stop()
        plan, files = task
        if self._ended:
            return
        if len(files) > 1:
            with self._lock:
                self._waiting.extend((plan, [file]) for file in files)
            return
        ((display, _),) = files
        error = FileError(display, None, "the process that read it died; please report it")
        self._answers.put(([Reading(display, FileResult(errors=(error,)))], {}))

    def end(self) -> None:
        """Ends the process, whatever it does."""
        with self._lock:
            self._ended = True
        self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
