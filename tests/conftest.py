"""Keeps the tests out of the user's own cache, and runs the audit's command."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from audit_scripts import Audit, Ran


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRECISIONLINT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Audit:
    """Runs the command on a script in this process, whose torch is imported already."""
    from precisionlint.cli import main

    monkeypatch.chdir(tmp_path)

    def run(source: str, *arguments: str, options: tuple[str, ...] = ()) -> Ran:
        (tmp_path / "train.py").write_text(source)
        code = main(["audit", *options, "train.py", *arguments])
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
