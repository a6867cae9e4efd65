"""Starts the processes in which kernels run, shares a run among them, and hands on what they say.

It knows neither torch nor triton: what a request means is the worker's to know. A worker that dies, or that says nothing
for too long, costs the kernel that it was at: another one goes on with the next.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

AT_ONCE = 2
"""Workers of a shared run, at most: a process that interprets keeps one core busy and some 400 MiB."""

LIMIT = 300.0
"""Seconds that one input, the loading of a module, or one compilation may take."""

_LOOK = 0.2
"""Seconds between looks at which worker is late."""

_AT_MOST = 5.0
"""Seconds that are waited for the end of a worker that was killed: what it started itself may hold its output open."""


class _Worker(Struct):
    """One of the processes of a run, and the ones that take its place when it dies."""

    request: Mapping[str, Any]
    said: queue.Queue[dict[str, Any] | None]
    limit: float
    process: subprocess.Popen[str] | None = None
    since: float | None = None
    """When it last said something; None while it starts, and when it has ended."""
    late: bool = False
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self) -> None:
        """Runs processes until one has done what is left of the request, or one died before it came to a kernel."""
        after: int | None = -1
        while after is not None and self._start():
            after = self._listen(after)
        self.said.put(None)

    def _start(self) -> bool:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if self.request["mode"] == "interpret":
            environment |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
        with self.lock:
            if self.closed:
                return False
            self.late = False
            self.process = subprocess.Popen(
                [sys.executable, "-m", "precisionlint.kernels.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                encoding="utf-8",
            )
        return True

    def _listen(self, after: int) -> int | None:
        """Hands on what the process says; the kernel after which another process must go on, or None."""
        process, order, at, done, lost = self.process, None, "", False, False
        assert process is not None and process.stdin is not None and process.stdout is not None
        # Its standard input stays open: when it ends, with this process, so does the worker.
        with process.stdin, process.stdout:
            try:
                process.stdin.write(json.dumps({**self.request, "after": after}) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    try:
                        message = json.loads(line)
                    except ValueError:  # it was killed while it wrote
                        break
                    self.since = time.monotonic()
                    if "case" in message:
                        order, at = message["order"], f", at {message['kernel']}, {message['case']}"
                    done, lost = done or "done" in message, lost or "lost" in message
                    if not {"done", "ready", "lost"} & set(message):
                        self.said.put(message)
            except BrokenPipeError:  # it died before it had read its request
                pass
            self.since = None
            code = process.wait()
        if not (done or lost or self.closed):
            self.said.put({"error": f"the process that runs the kernels {self._end(code)}{at}"})
        return None if done or self.closed else order

    def _end(self, code: int) -> str:
        if self.late:
            return f"said nothing for {self.limit:g} s and was stopped (--timeout)"
        return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"

    def stop_if_late(self) -> None:
        """Ends the process where it has said nothing for longer than it may."""
        since = self.since
        if since is not None and time.monotonic() - since > self.limit and self.process is not None:
            self.late, self.since = True, None
            self.process.kill()

    def close(self) -> None:
        """Ends the process, and starts no other."""
        with self.lock:
            self.closed = True
            if self.process is not None:
                self.process.kill()


def answers(request: Mapping[str, Any], *, shared: bool = False, limit: float = LIMIT) -> Iterator[dict[str, Any]]:
    """What the worker of a request says, message by message; a worker that dies or is late says so as an error.

    A shared request names many kernels: each worker takes every second one, and what they say comes as it is said.
    `limit` is in seconds and counts from when a worker has loaded torch and triton.
    """
    count = min(AT_ONCE, os.cpu_count() or 1) if shared else 1
    said: queue.Queue[dict[str, Any] | None] = queue.Queue()
    workers = [_Worker({**request, "share": [index, count]}, said, limit) for index in range(count)]
    threads = [threading.Thread(target=worker.serve, daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        running = count
        while running:
            for worker in workers:
                worker.stop_if_late()
            try:
                message = said.get(timeout=_LOOK)
            except queue.Empty:
                continue
            if message is None:
                running -= 1
            else:
                yield message
    finally:
        for worker in workers:
            worker.close()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_AT_MOST)
