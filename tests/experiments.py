"""Runs the experiments of rule pages: torch is imported once, then every experiment has a fork of that process for itself.

A fork starts from fresh torch defaults (dtype, seeds, registered ops), so no experiment sees what another one left.
It knows nothing of pages beyond their fenced blocks. By hand:

    python tests/experiments.py [--write] PAGE...     print each page's output, or put it into the page's text block
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

BLOCK = re.compile(r"(```python experiment\n)(.*?)(\n```\n+```text\n)(.*?)(\n?```)", re.DOTALL)


class Worker:
    """One warm process that runs experiments in turn; `run(source)` returns what the experiment printed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, source: str) -> str:
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended with status {self.process.wait()}")
        output, failed = json.loads(answer)
        if failed:
            raise RuntimeError(f"the experiment failed:\n{output}")
        return output

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def run_in_fork(source: str) -> tuple[str, bool]:
    """(printed, failed). What the experiment prints leaves the child through a pipe; stderr stays the worker's."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        os.close(reading)
        sys.stdout = os.fdopen(writing, "w", encoding="utf-8")
        try:
            import torch

            torch.set_num_threads(1)  # a fixed order of sums
            warnings.simplefilter("ignore")
            exec(compile(source, "<experiment>", "exec"), {"__name__": "__experiment__"})
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    return output, status != 0


def serve() -> None:
    import torch  # noqa: F401  # once, here, for all forks

    for line in sys.stdin:
        print(json.dumps(run_in_fork(json.loads(line))), flush=True)


def main(arguments: list[str]) -> None:
    worker = Worker()
    for name in (a for a in arguments if a != "--write"):
        page = Path(name)
        text = page.read_text(encoding="utf-8")
        for block in reversed(list(BLOCK.finditer(text))):
            start = time.perf_counter()
            output = worker.run(block[2]).rstrip("\n")
            print(f"{page.stem}: {time.perf_counter() - start:.1f} s\n{output}")
            text = text[: block.start(4)] + output + "\n```" + text[block.end() :]
        if "--write" in arguments:
            page.write_text(text, encoding="utf-8")
    worker.close()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
