"""What a verification says in the end, as plain data that crosses from a worker process to its parent.

It knows neither torch nor triton. Lines count from 1.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Mode = Literal["interpret", "compile", "native"]

MODES: tuple[Mode, ...] = ("interpret", "compile", "native")


class Violation(Struct, frozen=True):
    """A clause of a contract that does not hold for one input: how often, and the first place where it does not."""

    clause: str
    got: str
    allowed: str
    count: int = 1
    of: int = 1
    index: tuple[int, ...] = ()
    excess: str = ""
    """How far the worst element lies beyond what is allowed, in the clause's own measure."""
    hint: str = ""
    """What the author of the kernel may have meant, where that shows."""


class Tried(Struct, frozen=True):
    """One input of the corpus, the clauses that it broke, and the seconds that it took."""

    case: str
    violations: tuple[Violation, ...]
    seconds: float
    leave_out: tuple[str, ...] = ()
    """The options of a contract, as NAME=VALUE, with which this input is not tried."""


class Outcome(Struct, frozen=True):
    """One launcher against one contract in one mode."""

    kernel: str
    """The bundled kernel's name, or MODULE:LAUNCHER as the user gave it."""
    contract: str
    mode: Mode
    path: str
    line: int
    tried: tuple[Tried, ...] = ()
    refused: str = ""
    """Why this mode cannot judge the kernel; empty where it can."""

    @property
    def sound(self) -> bool:
        return not any(tried.violations for tried in self.tried)


class Multiplication(Struct, frozen=True):
    """A dot in compiled code: MLIR's names of the operands' and the result's types, and when the sum is promoted."""

    a: str
    b: str
    result: str
    promotion: str
    path: str
    line: int


class Evidence(Struct, frozen=True):
    """What a rule says of compiled code."""

    rule: str
    severity: str
    message: str
    path: str
    line: int


class Compiled(Struct, frozen=True):
    """One kernel, compiled for one target. None is what no tool could say."""

    kernel: str
    target: str
    launcher: str = ""
    products: tuple[Multiplication, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    divisions: tuple[tuple[str, int], ...] = ()
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    """Bytes of shared memory of a program."""
    seconds: float = 0.0
    failed: str = ""


class Measured(Struct, frozen=True):
    """One measurement on a GPU: what was measured, what came out, and what it is held against, in words."""

    kernel: str
    what: str
    got: str
    against: str


class Verification(Struct, frozen=True):
    """A whole run. `errors` are launchers that could not be loaded or workers that died, one line each."""

    outcomes: tuple[Outcome, ...]
    unchecked: tuple[str, ...]
    """What nothing in this run looked at, one sentence each."""
    errors: tuple[str, ...] = ()
    compiled: tuple[Compiled, ...] = ()
    measured: tuple[Measured, ...] = ()

    @property
    def unjudged(self) -> tuple[Outcome, ...]:
        """What one mode could not judge, and no other did."""
        judged = {(each.kernel, each.contract) for each in self.outcomes if not each.refused}
        return tuple(each for each in self.outcomes if each.refused and (each.kernel, each.contract) not in judged)

    @property
    def uncompiled(self) -> tuple[Compiled, ...]:
        """What did not compile in any configuration for a target."""
        built = {(each.launcher, each.kernel, each.target) for each in self.compiled if not each.failed}
        return tuple(each for each in self.compiled if (each.launcher, each.kernel, each.target) not in built)

    @property
    def exit_code(self) -> int:
        """2 where a kernel could not be run, compiled or judged, 1 where one is broken or a rule found a fault, else 0."""
        if self.errors or self.unjudged or self.uncompiled:
            return 2
        found = any(each.severity != "info" for built in self.compiled for each in built.evidence)
        return int(found or any(not outcome.sound for outcome in self.outcomes))


class Proof(Struct, frozen=True):
    """A kernel with a planted fault, or a correct one in another style (`fault` is empty), against its contract."""

    kernel: str
    contract: str
    fault: str
    caught_by: tuple[str, ...]
    """The inputs on which the contract was broken."""
    inputs: int
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the verifier did what it must: catch the fault, or say nothing of a correct kernel."""
        return bool(self.caught_by) == bool(self.fault)


class Proofs(Struct, frozen=True):
    """The verification of the verifier."""

    proofs: tuple[Proof, ...]
    errors: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        if self.errors:
            return 2
        return int(not all(proof.right for proof in self.proofs))
