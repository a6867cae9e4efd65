"""What verifying costs: seconds and peak memory of the bundled kernels in each mode, and of all planted faults.

    python tests/benchmarks/verify.py [--faults]

A script, not a test: its figures depend on the machine. Memory is the largest worker's, as the operating system counts
resident pages.
"""

import argparse
import resource
import time

from precisionlint.verify import prove, verify


def peak() -> float:
    """MiB of the largest process that has ended so far (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", action="store_true", help="the planted faults too, which takes minutes")
    options = parser.parse_args()
    for mode in ("interpret", "compile"):
        start = time.perf_counter()
        verification = verify(modes=(mode,))
        count = len(verification.outcomes) + len(verification.compiled)
        print(f"{mode}: {count} results, {time.perf_counter() - start:.0f} s, at most {peak():.0f} MiB")
    if options.faults:
        start = time.perf_counter()
        proofs = prove().proofs
        right = sum(proof.right for proof in proofs)
        print(f"faults: {right} of {len(proofs)} right, {time.perf_counter() - start:.0f} s, at most {peak():.0f} MiB")


if __name__ == "__main__":
    main()
