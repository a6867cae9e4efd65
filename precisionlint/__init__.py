"""Finds precision faults in mixed-precision and FP8 training code; importing it loads nothing but its version.

``precisionlint.check`` and ``precisionlint.audit`` are functions, so no modules of the package may have those names:
importing them would replace the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from precisionlint.findings import Report
    from precisionlint.trace.window import Audit

__version__ = "0.1.0"


def check(
    paths: Iterable[str],
    *,
    select: Collection[str] = (),
    extend_select: Collection[str] = (),
    ignore: Collection[str] = (),
    assume: Mapping[str, str] | None = None,
) -> Report:
    """Reads files and folders as ``precisionlint check`` does and returns what it found.

    ``select``, ``extend_select`` and ``ignore`` hold names of rules or families, or ``all``; ``assume`` limits the reading to
    one configuration, such as ``{"use_amp": "True"}``. What cannot be read is in the report's ``errors``. Raises
    catalogue.UnknownNameError for the name of a rule that is not there.
    """
    from precisionlint import catalogue, checking

    return checking.check(list(paths), select=catalogue.select(select, extend_select, ignore), assume=assume)


def audit(
    model: Any = None, optimizer: Any = None, scaler: Any = None, *, name: str | None = None, values: bool = False
) -> Audit:
    """Records one training step: ``with precisionlint.audit(model, optimizer, scaler) as audit: train_step(batch)``,
    then ``audit.report``.

    ``model`` is a torch.nn.Module, several in a dict or a list, or None: then modules are named when they are called.
    ``optimizer`` and ``scaler`` are one or a list; those left out are met when they are used. ``values`` reads every
    result of the step, to name the first that is not finite. Needs torch (the extra ``audit``). Raises TypeError for a
    model, optimizer or scaler that is none, UnsupportedTorchError where this torch lacks what the audit builds on.
    What the step raises passes through.
    """
    from precisionlint.trace.window import Audit

    return Audit(model, optimizer, scaler, name=name, values=values)
