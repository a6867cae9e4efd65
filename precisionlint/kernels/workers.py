"""Starts the processes in which kernels run, shares a run among them, and hands on what they say.

It knows neither torch nor triton: what a request means is the worker's to know.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

AT_ONCE = 2
"""Workers of a shared run, at most: a process that interprets keeps one core busy and some 400 MiB."""


def answers(request: Mapping[str, Any], *, shared: bool = False) -> Iterator[dict[str, Any]]:
    """What the worker of a request says, message by message; a worker that dies says so as an error.

    A shared request names many kernels: each worker takes every second one, and what they say comes as it is said.
    """
    count = min(AT_ONCE, os.cpu_count() or 1) if shared else 1
    said: queue.Queue[dict[str, Any] | None] = queue.Queue()
    workers = [_start(request) for _ in range(count)]
    readers = [
        threading.Thread(target=_read, args=(worker, {**request, "share": [index, count]}, said), daemon=True)
        for index, worker in enumerate(workers)
    ]
    try:
        for reader in readers:
            reader.start()
        running = count
        while running:
            message = said.get()
            if message is None:
                running -= 1
            else:
                yield message
    finally:
        for worker, reader in zip(workers, readers, strict=True):
            worker.kill()
            worker.wait()
            reader.join()
            if worker.stdout is not None:
                worker.stdout.close()


def _start(request: Mapping[str, Any]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if request["mode"] == "interpret":
        environment |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "precisionlint.kernels.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
    )


def _read(worker: subprocess.Popen[str], request: Mapping[str, Any], said: queue.Queue[dict[str, Any] | None]) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    last = ""
    try:
        with worker.stdin:
            json.dump(request, worker.stdin)
        for line in worker.stdout:
            message = json.loads(line)
            if "case" in message:
                last = f", at {message['kernel']}, {message['case']}"
            said.put(message)
    except BrokenPipeError:  # it died before it had read its request
        pass
    code = worker.wait()
    if code:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        said.put({"error": f"the process that runs the kernels {how}{last}"})
    said.put(None)
