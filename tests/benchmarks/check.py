"""How fast `precisionlint check` is, beside a bare libcst parse and the other linters that are installed.

    python tests/benchmarks/check.py FOLDER [--files N] [--one FILE ...]

Prints ratios of wall times that were taken side by side in one run: timings of one machine say nothing about another. A folder is
timed once per tool over the same sample of its files, and once more from the caches; `--one` times single files, start to finish, in
seconds of the processor (the least of five runs in turn), so that what else runs on the machine says little. The package is compiled
first, as an installed one is.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARSE_ONE = "import sys, libcst; libcst.parse_module(open(sys.argv[1], 'rb').read())"
PARSE_ALL = """
import sys, libcst
for path in open(sys.argv[1]).read().splitlines():
    try:
        libcst.parse_module(open(path, "rb").read())
    except Exception as error:
        print(path, type(error).__name__, file=sys.stderr)
"""
OTHERS = {
    "ruff": ["ruff", "check", "--select", "F", "--no-cache", "--exit-zero", "-q"],
    "fixit": ["fixit", "lint"],
    "torchfix": ["torchfix", "--select", "ALL"],
}


def seconds(command: list[str], repeat: int = 1) -> tuple[float, int]:
    """The shortest wall time of a command in seconds, and the largest resident size of a child so far in KiB."""
    import resource

    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        best = min(best, time.perf_counter() - start)
    return best, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def checker(cache: str = "", jobs: int = 1) -> list[str]:
    kept = ["--cache-dir", cache] if cache else ["--no-cache"]
    return [sys.executable, "-m", "precisionlint", "check", "--format", "json", "--jobs", str(jobs), *kept]


def busy(command: list[str]) -> float:
    """The seconds of the processor that a command takes, those of its own processes among them."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def single(paths: list[str]) -> None:
    for path in paths:
        with tempfile.TemporaryDirectory() as cache:
            commands = [[sys.executable, "-c", PARSE_ONE, path], [*checker(), path], [*checker(cache), path]]
            seconds(commands[-1])
            runs = [[busy(command) for command in commands] for _ in range(5)]
        parse, check, warm = (min(run[index] for run in runs) for index in range(3))
        lines = len(Path(path).read_bytes().splitlines())
        ratios = f"{check / parse:5.2f} x, unchanged {warm / parse:5.2f} x"
        print(f"{ratios} a process that imports libcst and parses it   {lines:6} lines   {path}")


def tool(name: str) -> str | None:
    """Where another linter is installed: beside this Python, or on the path."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def folder(root: Path, count: int) -> None:
    files = sorted(root.rglob("*.py"))
    files = files[:: max(1, len(files) // count)][:count] if count else files
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files, {size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as place:
        sample = Path(place, "sample")
        for path in files:
            target = sample / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        listing = Path(place, "files.txt")
        listing.write_text("\n".join(str(sample / path.relative_to(root)) for path in files))
        parse, _ = seconds([sys.executable, "-c", PARSE_ALL, str(listing)])
        check, memory = seconds([*checker(), str(sample)])
        print(f"{check / parse:6.2f} x a bare libcst parse of the same files (peak {memory / 1024:.0f} MiB)")
        two, _ = seconds([*checker(jobs=2), str(sample)])
        print(f"{check / two:6.2f} x faster in two processes than in one ({os.cpu_count()} processors)")
        cache = str(Path(place, "cache"))
        seconds([*checker(cache), str(sample)])
        warm, _ = seconds([*checker(cache), str(sample)], 3)
        ruff = tool("ruff")
        if ruff is not None:
            command = [ruff, "check", "--select", "F", "--exit-zero", "-q", "--cache-dir", str(Path(place, "ruff"))]
            seconds([*command, str(sample)])
            other, _ = seconds([*command, str(sample)], 3)
            print(f"{warm / other:6.2f} x ruff, both from their caches")
        for name, command in OTHERS.items():
            found = tool(name)
            if found is None:
                continue
            other, _ = seconds([found, *command[1:], str(sample)])
            print(f"{check / other:6.2f} x {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--files", type=int, default=0, help="so many files, evenly chosen (default: all)")
    parser.add_argument("--one", nargs="*", default=[], help="files to time one by one")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    compileall.compile_dir(str(Path(__file__).parents[2] / "precisionlint"), quiet=1)
    single(options.one)
    if options.folder is not None:
        folder(options.folder, options.files)


if __name__ == "__main__":
    main()
