"""Kernels with one known fault each, and correct ones in other styles: what verifies the verifier.

It knows faults, not how they are caught. Each launcher has the form that its contract asks for.
"""

from precisionlint.kernels.planted import elementwise, mx, nvfp4, products, quantizers, styles, whole
from precisionlint.kernels.planted.base import Planted


def planted() -> tuple[Planted, ...]:
    """Every fault and every correct style."""
    return (
        *elementwise.planted(),
        *quantizers.planted(),
        *mx.planted(),
        *nvfp4.planted(),
        *products.planted(),
        *styles.planted(),
        *whole.planted(),
    )
