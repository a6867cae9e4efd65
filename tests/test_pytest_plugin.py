"""The pytest plugin in real runs of pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CLIP, CLIP_LINE, SOUND

# By its module, whether or not the entry point of this checkout is installed.
COMMAND = [
    sys.executable,
    "-m",
    "pytest",
    "-p",
    "no:precisionlint",
    "-p",
    "precisionlint.pytest_plugin",
    "-p",
    "no:cacheprovider",
]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run([*COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (
        ("bad.py", CLIP),
        ("good.py", SOUND),
        ("other.py", "x = 1\n"),
        ("test_it.py", "def test_it(): pass\n"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_checks_are_tests_where_they_are_asked_for(project: Path):
    ran = run(project, "-q")
    assert (ran.returncode, "1 passed" in ran.stdout) == (0, True), ran.stdout
    ran = run(project, "-v", "--precisionlint")
    assert ran.returncode == 1
    assert "bad.py::precisionlint FAILED" in ran.stdout
    assert "good.py::precisionlint PASSED" in ran.stdout
    assert "test_it.py::test_it PASSED" in ran.stdout
    assert "other.py" not in ran.stdout
    assert f"bad.py:{CLIP_LINE}:9: error clip-before-unscale [*]: " in ran.stdout
    assert "Traceback" not in ran.stdout
    assert "1 failed, 2 passed" in ran.stdout


def test_settings_comments_and_severities_hold(project: Path):
    (project / "broken.py").write_text(f"{CLIP}\nx = (")
    ran = run(project, "-q", "--precisionlint")
    assert "2 failed" in ran.stdout
    assert "was never closed" in ran.stdout
    (project / "broken.py").unlink()
    (project / "precisionlint.toml").write_text('[severity]\nall = "info"\n')
    assert run(project, "-q", "--precisionlint").returncode == 0


STEP = """\
import torch


def step(model, optimizer, scaler, clip_first):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).sum()
    scaler.scale(loss).backward()
    if not clip_first:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def audited(precisionlint, clip_first):
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with precisionlint.audit(model, optimizer, scaler) as audit:
        step(model, optimizer, scaler, clip_first)
    return audit.report


def test_sound(precisionlint):
    precisionlint.assert_ok(audited(precisionlint, False))


def test_faulty(precisionlint):
    precisionlint.assert_ok(audited(precisionlint, True))


def test_allowed(precisionlint):
    precisionlint.assert_ok(audited(precisionlint, True), allow=["clip-before-unscale"])
"""


def test_a_step_is_audited_and_its_report_asserted(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "test_step.py").write_text(STEP)
    ran = run(tmp_path, "-v")
    assert "test_sound PASSED" in ran.stdout, ran.stdout
    assert "test_faulty FAILED" in ran.stdout
    assert "test_allowed PASSED" in ran.stdout
    assert "test_step.py:10:5: error clip-before-unscale" in ran.stdout


def test_loading_the_plugin_imports_neither_the_checker_nor_torch():
    script = (
        "import sys, precisionlint.pytest_plugin\n"
        "heavy = {'torch', 'libcst', 'precisionlint.reader', 'precisionlint.catalogue', 'precisionlint.trace'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
