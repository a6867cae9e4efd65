"""What calls outside the project do: to values, and to the timeline.

Knows torch's API by meaning (a scaler scales, an optimizer steps, a clip clips); which names have which meaning is the table of
``apis.py``. Nothing of a rule stands here: these modules only say what happened.
"""

from precisionlint.source.effects.common import choices, result
from precisionlint.source.effects.copies import averaged, blended
from precisionlint.source.effects.dispatch import call_external, call_method
from precisionlint.source.effects.gradients import attribute_set
from precisionlint.source.effects.kept import half_of, kept
from precisionlint.source.effects.optimizers import made, stepped, updates
from precisionlint.source.effects.own_ops import call_custom_op, decorated, launch
from precisionlint.source.effects.python import BUILTINS
from precisionlint.source.effects.regions import enter, enter_decorators, returned_by
from precisionlint.source.effects.scaling import annotated, branched, loss_divided, multiplied
from precisionlint.source.effects.unread import call_unknown
from precisionlint.source.effects.weights import module_called

__all__ = [
    "BUILTINS", "annotated", "attribute_set", "averaged", "blended", "branched", "call_custom_op", "call_external", "call_method",
    "call_unknown", "choices", "decorated", "enter", "enter_decorators", "half_of", "kept", "launch", "loss_divided", "made", "module_called",
    "multiplied", "result", "returned_by", "stepped", "updates",
]  # fmt: skip
