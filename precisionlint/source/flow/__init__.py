"""Value flow: what the functions of a file compute, as graphs of values with the dtypes that each can have (``precisionlint.valueflow``).

Arithmetic faults stand in single functions, most of them in files that hold no training program, and never need a path: so this
reader forks nothing. It evaluates each function once from its parameters (whose dtypes the caller decides), joins branches, goes
through loops twice (those of other files once), enters the functions of the project that are called, and tells the checks of every op.

``ops``       which names compute what, and what becomes of dtypes
``heap``      classes: the attributes that ``__init__`` and the other methods leave
``evaluate``  one call: its variables and expressions; ``statements`` its statements
``torch_calls``, ``python_calls``  what calls of theirs compute
``joins``     values of several paths as one
``remembered``  what functions of other files gave, for arguments of the same form
``words``     what syntax says by its words alone
``reading``   one file: which functions are read from where, and the other files that names lead to
``evidence``  what the project as a whole shows: half precision, training
"""

from __future__ import annotations

from precisionlint.source.flow.reading import read

__all__ = ["read"]
