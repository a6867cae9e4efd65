"""Finds precision faults in mixed-precision and FP8 training code; importing it loads nothing but its version.

``precisionlint.audit`` is a function, so no module of the package may have that name: importing it would replace the
function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precisionlint.trace.window import Audit

__version__ = "0.1.0"


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
