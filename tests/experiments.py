"""Runs the experiments of rule pages: torch is imported once, then each experiment has a fork of its own.

A fork starts from fresh torch defaults (dtype, seeds, registered ops), so no experiment sees what another one left.
By hand:

    python tests/experiments.py [--write] RULE...     print what the experiments print, or renew their pages with it
"""

import json
import os
import subprocess
import sys
import time
import traceback
import warnings


class Worker:
    """One warm process that runs experiments in turn; `run(source)` returns what the experiment printed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, source: str) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended with status {self.process.wait()}")
        printed, failed = json.loads(answer)
        if failed:
            raise RuntimeError(f"the experiment failed:\n{printed}")
        return str(printed)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


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
        printed = pipe.read()
    _, status = os.waitpid(child, 0)
    return printed, status != 0


def serve() -> None:
    import torch._dynamo  # noqa: F401 (once, here, for all forks; the first optimizer of a process would import the rest)

    for line in sys.stdin:
        print(json.dumps(run_in_fork(json.loads(line))), flush=True)


def main(arguments: list[str]) -> None:
    from precisionlint import catalogue

    worker = Worker()
    for name in (argument for argument in arguments if argument != "--write"):
        rule = catalogue.find(name)
        experiment = catalogue.experiment(rule)
        if experiment is None:
            print(f"{name}: no experiment")
            continue
        start = time.perf_counter()
        printed = worker.run(experiment.code)
        print(f"{name}: {time.perf_counter() - start:.1f} s\n{printed}", end="")
        if "--write" in arguments:
            block = f"{experiment.code}```\n```text\n"
            text = rule.page.read_text(encoding="utf-8")
            assert block + experiment.output in text
            rule.page.write_text(text.replace(block + experiment.output, block + printed), encoding="utf-8")
    worker.close()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
