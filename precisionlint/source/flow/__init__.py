"""Value flow: what the functions of a file compute, as graphs of values with the dtypes that each can have (``precisionlint.values``).

Arithmetic faults stand in single functions, most of them in files that hold no training program, and never need a path: so this
reader forks nothing. It evaluates each function once from its parameters (whose dtypes the caller decides), joins branches, goes
through loops twice, enters the functions of the project that are called, and tells the checks of every op.

``ops``       which names compute what, and what becomes of dtypes
``heap``      classes: the attributes that ``__init__`` and the other methods leave
``evaluate``  expressions and statements
``evidence``  what the project as a whole shows: half precision, training
"""

from __future__ import annotations

from precisionlint.source.flow.evaluate import read

__all__ = ["read"]
