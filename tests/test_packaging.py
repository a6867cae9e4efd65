"""The catalogue is found wherever the package runs from: a wheel, an editable install, a checkout; all of them real."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from precisionlint import __version__

ROOT = Path(__file__).parent.parent
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "rules").glob("*/*.md"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from, so that no test writes into the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "precisionlint"
    for folder in ("precisionlint", "rules"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def fresh_python(folder: Path) -> Path:
    """The interpreter of a new environment that sees the dependencies installed here, but not this precisionlint."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = Path(run(python, "-c", ask).strip())
    here = Path(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    (purelib / "dependencies.pth").write_text(f"{here}\n", encoding="utf-8")
    return python


def run(python: Path, *arguments: str, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    ran = subprocess.run([python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def install(python: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-build-isolation"]
    ran = subprocess.run([*pip, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def rules_folder(python: Path, cwd: Path) -> Path:
    script = "from precisionlint import catalogue; catalogue.load(); print(catalogue.folder())"
    return Path(run(python, "-c", script, cwd=cwd).strip())


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    ran = subprocess.run([*pip, str(checkout)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_with_its_rules_and_nothing_beside_it(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"precisionlint", f"precisionlint-{__version__}.dist-info"}
    assert sorted(name for name in names if re.fullmatch(r"precisionlint/rules/[^/]+/.+\.md", name)) == [
        f"precisionlint/{page}" for page in PAGES
    ]
    assert "precisionlint/py.typed" in names


def test_the_wheel_asks_for_neither_torch_nor_triton_without_an_extra(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"precisionlint-{__version__}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    core = {re.split(r"[^\w.-]", each)[0] for each in required if "extra ==" not in each}
    assert core == {"libcst", "msgspec", "pyyaml", "rich", "tomli"}
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)) == {"audit", "lsp", "verify", "test"}


def test_an_installed_wheel_finds_the_catalogue_in_itself(wheel: Path, tmp_path: Path):
    python = fresh_python(tmp_path / "env")
    install(python, str(wheel))
    folder = rules_folder(python, tmp_path)
    assert folder.parts[-2:] == ("precisionlint", "rules")
    assert folder.is_relative_to(tmp_path / "env")
    command = python.with_name("precisionlint")
    assert run(command, "--version") == f"precisionlint {__version__}\n"
    assert "clip-before-unscale" in run(command, "rules")
    assert run(command, "explain", "clip-before-unscale").startswith("# clip-before-unscale\n")


def test_an_editable_install_reads_the_pages_of_its_checkout(checkout: Path, tmp_path: Path):
    python = fresh_python(tmp_path / "env")
    install(python, "-e", str(checkout))
    assert rules_folder(python, tmp_path) == checkout / "rules"
    assert "clip-before-unscale" in run(python.with_name("precisionlint"), "rules")


def test_a_checkout_that_is_not_installed_reads_its_own_pages(checkout: Path, tmp_path: Path):
    python = fresh_python(tmp_path / "env")
    assert rules_folder(python, checkout) == checkout / "rules"
    assert "clip-before-unscale" in run(python, "-m", "precisionlint", "rules", cwd=checkout)


def test_a_package_without_its_catalogue_says_so_in_one_line(checkout: Path, tmp_path: Path):
    shutil.copytree(checkout / "precisionlint", tmp_path / "precisionlint")
    ran = subprocess.run([sys.executable, "-m", "precisionlint", "rules"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no rule catalogue" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_the_continuous_check_runs_the_readmes_test_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python3 -m venv .+pytest.*$", readme, re.MULTILINE)
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for step in command.split(" && ")[1:]:
        assert re.sub(r"\.venv/bin/(\w+)", r'"$bin/\1"', step) in script


def test_the_readme_shows_what_its_first_command_prints():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text\n(.+?)^```$", readme, re.MULTILINE | re.DOTALL)[0]
    command = [sys.executable, "-m", "precisionlint", "check", "fixtures/projects/digits"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    beginning, end = shown.split("[three more]\n")
    assert ran.stdout.startswith(beginning)
    assert (ran.stdout + ran.stderr).endswith(end)


def test_every_requirement_of_the_test_environment_is_pinned():
    pinned = {
        re.split(r"[=;]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "tests/constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    missing = requirements("precisionlint", {"test"}, set()) - pinned
    assert missing == set()


def requirements(name: str, extras: set[str], seen: set[str]) -> set[str]:
    """The names of all that a distribution needs here, and of what that needs."""
    needed: set[str] = set()
    for each in map(Requirement, requires(name) or []):
        if each.marker and not any(each.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            continue
        needed.add(each.name.lower().replace("_", "-"))
    for each in needed - seen:
        seen.add(each)
        needed |= requirements(each, set(), seen)
    return needed
