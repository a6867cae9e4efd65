"""Finds precision faults in mixed-precision and FP8 training code; importing it loads nothing but its version."""

__version__ = "0.1.0"
