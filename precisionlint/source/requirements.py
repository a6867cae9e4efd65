"""The oldest torch that a project says it works with, by the requirements that it declares."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

FILES = ("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "requirements/*.txt", "requirements-*.txt")
TORCH = re.compile(
    r"""(?:^|["'\s;,=\[])torch\s*(?:\[[^\]]*\])?\s*\(?\s*(?P<bounds>(?:[<>=!~]=?|===)\s*[\w.*+]+[^"'\n#;]*)""", re.M
)
BOUND = re.compile(r"(?:>=|==|~=|>|===)\s*(\d+(?:\.\d+)*)")


def version(text: str) -> tuple[int, ...]:
    """``"2.3"`` as (2, 3)."""
    return tuple(int(part) for part in text.split("."))


def oldest_torch(root: Path) -> str:
    """The lowest version that any of the project's requirements allows at least; empty where none says one."""
    found: list[str] = []
    for pattern in FILES:
        for path in sorted(root.glob(pattern)):
            with contextlib.suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                for match in TORCH.finditer(text):
                    found += BOUND.findall(match["bounds"])[:1]
    return min(found, key=version, default="")
