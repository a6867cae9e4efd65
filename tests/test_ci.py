"""Where people meet it: the pre-commit hook in a real run, the action's and the README's scripts as their services run them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import CLIP, CLIP_LINE, SOUND

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SITE = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def run(*command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PRE_COMMIT"))}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**kept, **more})


def commit_all(folder: Path) -> str:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        ran = run(*git, *arguments, cwd=folder)
        assert ran.returncode == 0, ran.stderr
    return run("git", "rev-parse", "HEAD", cwd=folder).stdout.strip()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """This checkout as a repository of its own, and its revision."""
    copy = tmp_path_factory.mktemp("published") / "precisionlint"
    for folder in ("precisionlint", "rules"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".pre-commit-hooks.yaml"):
        shutil.copy(ROOT / name, copy)
    return copy, commit_all(copy)


def test_the_hook_runs_in_a_real_repository(published: tuple[Path, str], tmp_path: Path):
    pytest.importorskip("pre_commit")
    source, revision = published
    home = tmp_path / "project"
    home.mkdir()
    hooks = {"repos": [{"repo": str(source), "rev": revision, "hooks": [{"id": "precisionlint"}]}]}
    (home / ".pre-commit-config.yaml").write_text(yaml.safe_dump(hooks))
    (home / "precisionlint.toml").write_text('extend-exclude = ["third_party/"]\n')
    for name in ("train.py", "third_party/train.py"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(CLIP)
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": CLIP}
    (home / "train.ipynb").write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    (home / "notes.txt").write_text(CLIP)
    commit_all(home)
    # What the hook's environment needs is here already; nothing is fetched.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PYTHONPATH": SITE}
    environment = {**offline, "PRE_COMMIT_HOME": str(tmp_path / "home"), "PRE_COMMIT_COLOR": "never"}

    def hook() -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "-m", "pre_commit", "run", "--all-files", cwd=home, **environment)

    ran = hook()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "- hook id: precisionlint" in ran.stdout
    assert f"\ntrain.py:{CLIP_LINE}:9: error clip-before-unscale" in ran.stdout
    assert f"\ntrain.ipynb:cell 1:{CLIP_LINE}:9: error clip-before-unscale" in ran.stdout
    assert "found 2 errors" in ran.stdout
    (home / "train.py").write_text(SOUND)
    (home / "train.ipynb").unlink()
    run("git", "add", "-A", cwd=home)
    ran = hook()
    assert (ran.returncode, "Passed" in ran.stdout) == (0, True), ran.stdout

    hooks["repos"][0]["hooks"] = [{"id": "precisionlint-fix"}]
    (home / ".pre-commit-config.yaml").write_text(yaml.safe_dump(hooks))
    (home / "train.py").write_text(CLIP)
    run("git", "add", "-A", cwd=home)
    ran = hook()
    assert (ran.returncode, "files were modified by this hook" in ran.stdout) == (1, True), ran.stdout + ran.stderr
    assert "scaler.unscale_(optimizer)" in (home / "train.py").read_text()
    assert "scaler.unscale_(optimizer)" not in (home / "third_party/train.py").read_text()


def blocks(language: str) -> list[Any]:
    found = re.findall(rf"^```{language}\n(.+?)^```$", README, re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(text) for text in found]


def project(tmp_path: Path) -> dict[str, str]:
    """A project with a fault in ``tmp_path``, and the environment in which ``precisionlint`` and ``pip`` are commands."""
    (tmp_path / "train.py").write_text(CLIP)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "precisionlint").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m precisionlint "$@"\n')
    (tools / "pip").write_text("#!/bin/sh\n# it is there already\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def test_the_gitlab_job_of_the_readme_writes_its_report(tmp_path: Path):
    (job,) = (each["precisionlint"] for each in blocks("yaml") if "precisionlint" in each)
    environment = project(tmp_path)
    ran = run("bash", "-e", "-c", "\n".join(job["script"]), cwd=tmp_path, **environment)
    assert ran.returncode == 1, ran.stderr
    report = tmp_path / job["artifacts"]["reports"]["codequality"]
    assert [issue["check_name"] for issue in json.loads(report.read_text())] == ["clip-before-unscale"]
    assert job["artifacts"]["when"] == "always"


def test_the_github_workflow_of_the_readme_names_what_is_here():
    (workflow,) = (each for each in blocks("yaml") if "jobs" in each)
    (job,) = workflow["jobs"].values()
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    own = [each for each in used if "precisionlint" in each]
    assert own
    for each in own:
        path = each.partition("@")[0].split("/", 2)[2]
        assert (ROOT / path / "action.yml").is_file()
    action = yaml.safe_load((ROOT / ".github/actions/check/action.yml").read_text())
    given = {name for step in job["steps"] if "precisionlint" in step.get("uses", "") for name in step.get("with", {})}
    assert given <= set(action["inputs"])
    upload = next(step for step in job["steps"] if "upload-sarif" in step.get("uses", ""))
    assert upload["if"] == "always()"


def test_the_pre_commit_configuration_of_the_readme_names_a_hook_that_is_here():
    (configuration,) = (each for each in blocks("yaml") if "repos" in each)
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert {hook["id"] for repo in configuration["repos"] for hook in repo["hooks"]} <= hooks


def test_the_problem_matcher_of_the_readme_reads_what_the_task_prints(tmp_path: Path):
    (text,) = re.findall(r"^```json\n(.+?)^```$", README, re.MULTILINE | re.DOTALL)
    (task,) = json.loads(text)["tasks"]
    environment = project(tmp_path)
    ran = run("bash", "-c", task["command"], cwd=tmp_path, **environment)
    pattern = task["problemMatcher"]["pattern"]
    matched = [match for line in ran.stdout.splitlines() if (match := re.match(pattern["regexp"], line))]
    parts = {name: matched[0][group] for name, group in pattern.items() if isinstance(group, int)}
    assert len(matched) == 1
    assert (parts["file"], parts["line"], parts["severity"]) == ("train.py", str(CLIP_LINE), "error")
    assert parts["code"] == "clip-before-unscale"


def test_the_action_annotates_and_writes_sarif(tmp_path: Path):
    action = yaml.safe_load((ROOT / ".github/actions/check/action.yml").read_text())
    (script,) = (step["run"] for step in action["runs"]["steps"] if step.get("name") == "check")
    environment = project(tmp_path)
    environment |= {
        "PYTHON": sys.executable,
        "RUNNER_TEMP": str(tmp_path),
        "PATHS": ". train.py",
        "ARGUMENTS": "",
        "SARIF_FILE": "",
    }
    ran = run("bash", "-e", "-o", "pipefail", "-c", script, cwd=tmp_path, **environment)
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.startswith(f"::error file=train.py,line={CLIP_LINE},")
    assert not list(tmp_path.glob("*.sarif"))
    more = {"ARGUMENTS": "--exit-zero --select loss-scaling", "SARIF_FILE": "out.sarif"}
    ran = run("bash", "-e", "-o", "pipefail", "-c", script, cwd=tmp_path, **{**environment, **more})
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert {f"{name.upper().replace('-', '_')}" for name in action["inputs"]} >= {"PATHS", "ARGUMENTS", "SARIF_FILE"}
    evil = {"PATHS": "train.py $(touch pwned) `touch pwned` ; touch pwned"}
    run("bash", "-e", "-o", "pipefail", "-c", script, cwd=tmp_path, **{**environment, **evil})
    assert not (tmp_path / "pwned").exists()
