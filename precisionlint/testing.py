"""For tests of one's own kernels: a launcher is held against its contract, as `precisionlint verify` does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precisionlint.kernels.launchers import LauncherError, spec_of
from precisionlint.kernels.outcome import Mode
from precisionlint.report import verified
from precisionlint.verify import verify


def assert_keeps_contract(
    launch: Callable[..., Any],
    contract: str | None = None,
    *,
    options: Mapping[str, str] | None = None,
    modes: Sequence[Mode] | None = None,
    targets: Sequence[str] = ("sm_90",),
    deep: bool = False,
) -> None:
    """Fails with the report where a launcher breaks its contract, or a rule finds a fault in its compiled code.

    `launch` is a function of a module, which other processes import; `contract` and `options` are needed where
    `precisionlint.contract` declared none. Fails too where the launcher cannot be judged. Raises AssertionError.
    """
    try:
        spec = spec_of(launch)
    except LauncherError as error:
        raise AssertionError(str(error)) from error
    result = verify(spec, contract=contract, options=options, modes=modes, targets=targets, deep=deep)
    refused = any(outcome.refused for outcome in result.outcomes)
    if result.exit_code or refused:
        raise AssertionError("\n".join((*result.errors, *verified.render(result))))
