"""Rules from other packages: the example is built, installed and run; plugins that break their contract are one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CLIP

ROOT = Path(__file__).parent.parent
BUILD = ["-q", "--no-deps", "--no-build-isolation", "--no-index"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example plugin is installed."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "fixtures/plugin", source)
    pip = [sys.executable, "-m", "pip", "install", *BUILD, "--target", str(target), str(source)]
    ran = subprocess.run(pip, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return target


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "precisionlint", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "setup.py").write_text("")
    (project / "train.py").write_text(CLIP)
    return project


@pytest.mark.parametrize("more", [["--no-cache"], [], ["--no-cache", "--jobs", "2"]])
def test_the_rules_of_a_plugin_are_found_beside_our_own(more: list[str], installed: Path, project: Path):
    (project / "train2.py").write_text(CLIP)
    for _ in range(2):
        ran = run(installed, "check", ".", "--format", "concise", *more, cwd=project)
        assert (ran.returncode, ran.stderr) == (1, "")
        told = [line.split(": ")[1] for line in ran.stdout.splitlines()[:-1]]
        assert told == ["warning initial-scale-unsaid", "error clip-before-unscale [*]"] * 2


def test_the_example_keeps_the_marks_of_its_page(installed: Path, tmp_path: Path):
    script = (
        "import precisionlint, sys\nfrom precisionlint import catalogue\n"
        "for number, example in enumerate(catalogue.examples(catalogue.find('initial-scale-unsaid'))):\n"
        "    report = precisionlint.check('train.py', texts={'train.py': example.code}, select=['house'])\n"
        "    assert [(f.place.line, f.rule) for f in report.findings] == list(example.marks), report\n"
        "print('both')"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("both\n", "")


def test_a_plugins_rules_are_named_like_any_other(installed: Path, project: Path):
    assert "initial-scale-unsaid" in run(installed, "rules", cwd=project).stdout
    assert run(installed, "explain", "initial-scale-unsaid", cwd=project).stdout.startswith("# initial-scale-unsaid")
    text = CLIP.replace('("cuda")\n    for', '("cuda")  # precisionlint: ignore[house] a test\n    for')
    (project / "train.py").write_text(text)
    ran = run(installed, "check", ".", "--format", "concise", "--ignore", "loss-scaling", cwd=project)
    assert ran.stdout.startswith("found nothing; 1 suppressed")
    assert run(installed, "check", ".", "--select", "house", cwd=project).returncode == 0


def plugin(site: Path, module: str, text: str | None, page: str | None) -> None:
    metadata = site / "bad-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[console_scripts]\nx = y:z\n\n[precisionlint.rules]\n# a comment\nbad = {module}\n"
    )
    if text is not None:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(text)
    if page is not None:
        (site / module / "rules/bad").mkdir(parents=True)
        example = ROOT / "fixtures/plugin/house_rules/rules/house/initial-scale-unsaid.md"
        shutil.copy(example, site / module / "rules/bad" / f"{page}.md")


FAMILY = "from precisionlint.checks import Automaton, Family\nFAMILY = Family(Automaton('{}', None, lambda s, e: s))\nFAMILIES = (FAMILY,)\n"


@pytest.mark.parametrize(
    ("text", "page", "complaint"),
    [
        (None, None, "there is no module bad_rules"),
        ("", None, "there is no folder"),
        ("1 / 0", "some-rule", "ZeroDivisionError: division by zero"),
        ("import nothing_of_this_name", "some-rule", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("", "some-rule", "AttributeError: module 'bad_rules' has no attribute 'FAMILIES'"),
        ("FAMILIES = [1]", "some-rule", "FAMILIES holds something that is no precisionlint.checks.Family"),
        (FAMILY.format("bad"), "some-rule", "the rule some-rule has a page and no check"),
        (
            FAMILY.format("bad")
            + "from precisionlint.events import Step\nFAMILY.rule('lone', Step)(lambda s, e: ())\n",
            "lone2",
            "the rule lone has no page",
        ),
        (
            FAMILY.format("loss-scaling")
            + "from precisionlint.events import Step\nFAMILY.rule('one', Step)(lambda s, e: ())\n",
            "one",
            "another family's automaton is called loss-scaling already",
        ),
    ],
)
def test_a_plugin_that_breaks_its_contract_is_one_line(
    text: str | None, page: str | None, complaint: str, tmp_path: Path, project: Path
):
    plugin(tmp_path / "site", "bad_rules", text, page)
    ran = run(tmp_path / "site", "check", ".", "--no-cache", cwd=project)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.stderr
    assert ran.stderr.startswith("precisionlint: the plugin bad of bad-1.0: ")
    assert complaint in ran.stderr


def test_a_plugins_page_that_takes_our_name_is_one_line(tmp_path: Path, project: Path):
    plugin(tmp_path / "site", "bad_rules", FAMILY.format("bad"), "clip-before-unscale")
    ran = run(tmp_path / "site", "rules", cwd=project)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "the name 'clip-before-unscale' is taken by" in ran.stderr
