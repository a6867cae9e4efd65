"""Settings: where they are found, what overrides them, what each does to a run, and clear words for those that are wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CLIP

import precisionlint
from precisionlint import cli, policy
from precisionlint.config import KEYS, ConfigError, Configuration, Settings, read, shown
from precisionlint.findings import Report


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str = CLIP) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def pyproject(text: str, folder: str = ".") -> None:
    write(f"{folder}/pyproject.toml", f"[tool.precisionlint]\n{text}")


def found(report: Report) -> list[tuple[str, str, str]]:
    return [(each.place.path, each.rule, each.severity) for each in report.findings]


def rules(*paths: str, **options: object) -> list[str]:
    return [each.rule for each in precisionlint.check(paths, **options).findings]  # type: ignore[arg-type]


def test_without_a_configuration_the_defaults_hold():
    write("train.py")
    assert found(precisionlint.check("train.py")) == [("train.py", "clip-before-unscale", "error")]


@pytest.mark.parametrize("name", ["pyproject.toml", "precisionlint.toml"])
def test_settings_are_found_from_the_file_upwards(name: str):
    write("a/b/train.py")
    text = 'ignore = ["loss-scaling"]\n'
    write(f"a/{name}", text if name == "precisionlint.toml" else f"[tool.precisionlint]\n{text}")
    assert rules("a/b/train.py") == []
    assert rules("a") == []


def test_each_file_has_the_nearest_settings_and_a_pyproject_without_the_section_is_passed_over():
    pyproject('ignore = ["loss-scaling"]\n')
    write("one/train.py")
    write("two/train.py")
    write("three/train.py")
    write("two/pyproject.toml", "[project]\nname = 'two'\n")
    pyproject("", "three")
    assert found(precisionlint.check(".")) == [("three/train.py", "clip-before-unscale", "error")]


def test_its_own_file_speaks_before_pyproject():
    write("train.py")
    pyproject('ignore = ["loss-scaling"]\n')
    write("precisionlint.toml", 'severity = { loss-scaling = "info" }\n')
    assert found(precisionlint.check("train.py")) == [("train.py", "clip-before-unscale", "info")]


def test_a_configuration_that_is_named_is_the_only_one_and_isolated_runs_have_none():
    write("train.py")
    pyproject('ignore = ["loss-scaling"]\n')
    write("other/strict.toml", 'severity = { all = "warning" }\n')
    assert found(precisionlint.check("train.py", config="other/strict.toml"))[0][2] == "warning"
    assert found(precisionlint.check("train.py", isolated=True))[0][2] == "error"
    assert found(precisionlint.check("train.py")) == []


def test_a_selection_on_the_command_line_replaces_the_projects_and_the_rest_adds_to_it():
    write("train.py")
    pyproject('select = ["master-weights"]\nignore = ["clip-before-unscale"]\n')
    assert rules("train.py") == []
    assert rules("train.py", select=["clip-before-unscale"]) == ["clip-before-unscale"]
    assert rules("train.py", extend_select=["clip-before-unscale"]) == []
    pyproject('select = ["master-weights"]\n')
    assert rules("train.py", extend_select=["clip-before-unscale"]) == ["clip-before-unscale"]
    assert rules("train.py", extend_select=["loss-scaling"], ignore=["clip-before-unscale"]) == []


def test_rules_are_left_out_by_file_and_patterns_count_from_the_configuration():
    write("pkg/tests/train.py")
    write("pkg/train.py")
    write("pkg/old_train.py")
    pyproject(
        '[tool.precisionlint.per-file-ignores]\n"tests/" = ["all"]\n"tests/**" = ["all"]\n"old_*" = ["loss-scaling"]\n',
        "pkg",
    )
    assert [path for path, _, _ in found(precisionlint.check("pkg"))] == ["pkg/train.py"]
    assert rules("pkg/tests/train.py") == []


def test_the_narrower_name_decides_on_a_severity():
    write("train.py")
    pyproject('[tool.precisionlint.severity]\nclip-before-unscale = "info"\nall = "warning"\nloss-scaling = "error"\n')
    assert found(precisionlint.check("train.py")) == [("train.py", "clip-before-unscale", "info")]
    assert precisionlint.check("train.py").exit_code == 0
    assert precisionlint.check("train.py", severity={"clip-before-unscale": "warning"}).exit_code == 1


def test_excluded_files_are_left_out_unless_they_are_named():
    for name in ("own/train.py", "third_party/train.py", "build/train.py", "gen_train.py"):
        write(name)
    pyproject('extend-exclude = ["third_party/", "gen_*.py"]\n')
    paths = [path for path, _, _ in found(precisionlint.check("."))]
    assert paths == ["own/train.py"]
    assert rules("third_party/train.py") == ["clip-before-unscale"]
    assert rules("third_party") == ["clip-before-unscale"]
    pyproject('exclude = ["third_party/"]\n')
    assert [path for path, _, _ in found(precisionlint.check("."))] == [
        "build/train.py",
        "gen_train.py",
        "own/train.py",
    ]


def test_hooks_name_files_that_the_project_excludes():
    write("third_party/deep/train.py")
    pyproject('extend-exclude = ["third_party/"]\nforce-exclude = true\n')
    report = precisionlint.check("third_party/deep/train.py")
    assert (report.findings, report.coverage.files) == ((), 0)


def test_why_nothing_is_read_is_told(capsys):
    write("third_party/train.py")
    write("third_party/next.py")
    pyproject('extend-exclude = ["third_party/*.py"]\nforce-exclude = true\n')
    named = ["third_party/next.py", "third_party/train.py"]
    assert cli.main(["check", *named]) == 0
    said = "left out, as the settings exclude it and force-exclude is on"
    assert capsys.readouterr() == ("found nothing\n", f"precisionlint: {said}: {', '.join(named)}\n")
    assert cli.main(["check", "third_party"]) == 0
    told = capsys.readouterr().err
    assert told.endswith("in third_party, apart from what git ignores or the settings exclude\n")


def test_assumptions_and_the_device_reach_the_reading():
    switched = CLIP.replace("def train(loader):", "def train(loader, amp):")
    switched = switched.replace('("cuda")\n    for', '("cuda", enabled=amp)\n    for')
    write("train.py", switched.replace("torch.float16)", "torch.float16, enabled=amp)"))
    assert rules("train.py") == ["clip-before-unscale"]
    pyproject("assume = { amp = false }\n")
    assert rules("train.py") == []
    fp32 = "import torch\nmodel = torch.nn.Linear(2, 2).cuda()\nopt = torch.optim.SGD(model.parameters())\nmodel(x).sum().backward()\nopt.step()\n"
    write("fp32.py", fp32)
    assert rules("fp32.py") == ["tf32-off"]
    pyproject('device = "rocm"\n')
    assert rules("fp32.py") == []
    write("fp32.py", fp32.replace(".cuda()", ""))
    assert rules("fp32.py") == []
    pyproject('device = "cuda"\n')
    assert rules("fp32.py") == ["tf32-off"]


SWITCHES = """\
import torch

torch.backends.cuda.matmul.allow_tf32 = True
scaler = torch.cuda.amp.GradScaler()
"""
NEW, OLD = "tf32-legacy-api", "deprecated-amp-api"


def test_rules_that_depend_on_torch_obey_the_version_of_the_settings_then_that_of_the_requirements():
    write("run.py", SWITCHES)
    select = ["autocast", "matmul-precision"]
    assert rules("run.py", select=select) == [NEW, OLD]
    write("requirements.txt", "torch==2.6.0\n")
    write("setup.py", "")
    assert rules("run.py", select=select) == [OLD]
    assert rules("run.py", select=select, torch_version="2.3") == []
    pyproject('torch-version = ">=2.3,<2.10"\n')
    assert rules("run.py", select=select) == [NEW, OLD]
    assert rules("run.py", select=select, torch_version="2.8.1") == [OLD]


def test_a_comment_for_what_is_no_fault_with_this_torch_silences_nothing():
    write("run.py", SWITCHES.replace("= True", f"= True  # precisionlint: ignore[{NEW}]"))
    assert rules("run.py", select=[NEW, "unused-ignore"]) == []
    assert rules("run.py", select=[NEW, "unused-ignore"], torch_version="2.8") == ["unused-ignore"]


def test_a_cast_to_e4m3_saturates_by_itself_in_a_torch_that_does_that():
    write(
        "quantize.py",
        "import torch\n\n\ndef quantize(x, scale):\n    return (x * scale).to(torch.float8_e4m3fn)\n\n\n"
        "def quantize_gradient(x, scale):\n    return (x * scale).to(torch.float8_e5m2)\n",
    )
    assert rules("quantize.py", select=["fp8"]) == ["fp8-cast-without-clamp"] * 2
    assert rules("quantize.py", select=["fp8"], torch_version="2.11") == ["fp8-cast-without-clamp"] * 2
    assert rules("quantize.py", select=["fp8"], torch_version="2.12") == ["fp8-cast-without-clamp"]


ENGINE = """\
import torch
from lab.engine import Engine
from lab.clip import clip_norm


def train(model, loader):
    engine = Engine(mixed_precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = engine.prepare(model, optimizer)
    for x in loader:
        optimizer.zero_grad()
        engine.backward(model(x))
        clip_norm(model.parameters(), 1.0)
        optimizer.step()
"""
ACTS = {"lab.engine.Engine": "accelerate.Accelerator", "lab.clip.clip_norm": "torch.nn.utils.clip_grad_norm_"}


@pytest.mark.parametrize("own", [True, False], ids=["a class of the project", "a package that is not read"])
def test_a_class_of_others_acts_as_the_settings_say(own: bool):
    write("train.py", ENGINE)
    write("setup.py", "")
    if own:
        write("lab/__init__.py", "")
        write("lab/engine.py", "import secret\n\n\nclass Engine:\n    backward = secret.backward\n")
        write("lab/clip.py", "import secret\n\n\ndef clip_norm(parameters, norm):\n    secret.clip(parameters, norm)\n")
    assert rules(".") == []
    assert rules(".", frameworks=ACTS) == ["accelerate-raw-clip"]
    pyproject("[tool.precisionlint.frameworks]\n" + "".join(f'"{name}" = "{acts}"\n' for name, acts in ACTS.items()))
    assert rules(".") == ["accelerate-raw-clip"]


def test_a_trainer_of_others_is_read_in_a_file_that_names_torch_nowhere():
    text = (
        "from lab import Fitter, Settings\n\n\ndef run(model, data):\n    settings = Settings(fp16=True)\n"
        "    fitter = Fitter(model=model.half(), args=settings, train_dataset=data)\n    fitter.train()\n"
    )
    write("run.py", text)
    acts = {"lab.Fitter": "transformers.Trainer", "lab.Settings": "transformers.TrainingArguments"}
    assert rules("run.py") == []
    assert rules("run.py", frameworks=acts) == ["hf-half-load"]


WRONG = [
    ('selct = ["all"]', "pyproject.toml:2: unknown key 'selct'; did you mean 'select'?"),
    ("xyzzy = 1", "pyproject.toml:2: unknown key 'xyzzy'; known are select, extend-select"),
    ('select = "all"', 'pyproject.toml:2: select must be a list of words such as ["loss-scaling"], not "all"'),
    ("ignore = [1]", 'ignore must be a list of words such as ["tf32-off"], not [1]'),
    (
        'select = ["clip-befor-unscale"]',
        "pyproject.toml:2: no rule or family is called 'clip-befor-unscale'; did you mean",
    ),
    ('per-file-ignores = ["all"]', 'per-file-ignores must be a table, not ["all"]'),
    ('[tool.precisionlint.per-file-ignores]\n"a.py" = ["clp"]', "pyproject.toml:3: no rule or family is called 'clp'"),
    ('[tool.precisionlint.per-file-ignores]\n"a.py" = "all"', None),
    (
        'severity = { loss-scaling = "erorr" }',
        "pyproject.toml:2: the severity of loss-scaling must be one of error, warning, info, not \"erorr\"; did you mean 'error'?",
    ),
    (
        '[tool.precisionlint.severity]\n\nlos-scaling = "error"',
        "pyproject.toml:4: no rule or family is called 'los-scaling'",
    ),
    ("require-reason = 1", "require-reason must be true or false, not 1"),
    ('device = "gpu"', 'device must be one of cuda, rocm, cpu, mps, xpu, not "gpu"'),
    ("device = 1", "device must be one of cuda, rocm, cpu, mps, xpu, not 1"),
    ("assume = { a = [1] }", "assume: a must be a text, a number, true or false, not [1]"),
    (
        "torch-version = 2.6",
        'pyproject.toml:2: torch-version must be a version such as "2.6" or bounds such as ">=2.4,<2.9", not 2.6',
    ),
    ('torch-version = "new"', 'or bounds such as ">=2.4,<2.9", not "new"'),
    ('torch-version = ">=2.9,<2.4"', 'bounds that some version lies within, not ">=2.9,<2.4"'),
    ('torch-version = ">2.4,<2.4"', "pyproject.toml:2: torch-version must have bounds that some version lies within"),
    ('torch-version = ">=2.4,<=2.4"', None),
    (
        'extend-exclude = ["own/", "a[.py"]',
        'pyproject.toml:2: extend-exclude: "a[.py" is no pattern: a [ is not closed',
    ),
    ('exclude = [""]', 'exclude: "" is no pattern: it is empty'),
    ('exclude = ["# generated"]', 'exclude: "# generated" is no pattern: it is a comment'),
    (
        '[tool.precisionlint.per-file-ignores]\n"tests/[" = ["all"]',
        'pyproject.toml:3: per-file-ignores: "tests/[" is no pattern: a [ is not closed',
    ),
    (
        '[tool.precisionlint.frameworks]\n"lab.Engine" = "accelerate.Acelerator"',
        "pyproject.toml:3: frameworks: lab.Engine must act as a class or function of rules/frameworks.toml, not "
        "\"accelerate.Acelerator\"; did you mean 'accelerate.Accelerator'?",
    ),
    ('frameworks = { Engine = "accelerate.Accelerator" }', 'frameworks: "Engine" must be the full name of a class'),
    ('frameworks = ["accelerate"]', 'frameworks must be a table, not ["accelerate"]'),
    ("cache-dir = 1", "cache-dir must be a text, not 1"),
    ("policy = 1", "policy must be a table, not 1"),
    ("select = [", "pyproject.toml: Invalid value"),
    ("a = 1\na = 2", "pyproject.toml: Cannot overwrite a value"),
]


@pytest.mark.parametrize(("text", "complaint"), WRONG)
def test_what_is_wrong_is_one_line_with_its_place_and_exit_code_2(text: str, complaint: str | None, capsys):
    write("train.py")
    pyproject(text)
    code = cli.main(["check", "train.py"])
    out, err = capsys.readouterr()
    if complaint is None:
        assert (code, err) == (1, "")
        return
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err
    with pytest.raises(ConfigError):
        precisionlint.check("train.py")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[tool.precisionlint]\nselect = \x00", b"a = " + b"[" * 100_000])
def test_a_configuration_that_is_no_toml_is_one_line(data: bytes, capsys):
    write("train.py")
    Path("pyproject.toml").write_bytes(data)
    assert cli.main(["check", "train.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("text", ["tool = 1", "[tool]\nprecisionlint = 1"])
def test_a_section_that_is_no_table(text: str, capsys):
    write("train.py")
    write("pyproject.toml", text)
    assert cli.main(["check", "train.py", "--isolated"]) == 1
    assert cli.main(["check", "train.py"]) == (1 if text == "tool = 1" else 2)


def test_a_configuration_that_is_not_there_is_said(capsys):
    assert cli.main(["check", ".", "--config", "none.toml"]) == 2
    assert capsys.readouterr().err.endswith("none.toml: cannot be read: no such file or directory\n")


def test_what_the_command_line_or_a_program_gives_is_held_to_the_same(capsys):
    write("train.py")
    for option, value, said in (
        ("--exclude", "[", '"[" is no pattern: a [ is not closed'),
        ("--extend-exclude", "", '"" is no pattern: it is empty'),
        ("--torch-version", ">=2.9,<2.4", "must have bounds that some version lies within"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["check", "train.py", option, value])
        assert f"argument {option}: {said}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"extend-exclude: .* is no pattern"):
        precisionlint.check("train.py", extend_exclude="[")
    with pytest.raises(ConfigError, match="torch-version must have bounds"):
        precisionlint.check("train.py", torch_version=">=2.9,<2.4")


@pytest.mark.parametrize(
    ("text", "line", "given"),
    [
        ("[tool]\nprecisionlint = 3\n", 2, "3"),
        ("[[tool.precisionlint]]\nselect = ['all']\n", 1, '[{ "select" = ["all"] }]'),
        ("tool.precisionlint = ['loss-scaling']\n", 1, '["loss-scaling"]'),
    ],
)
def test_a_section_that_is_no_table_is_said(text: str, line: int, given: str, capsys):
    Path("pyproject.toml").write_text(text)
    Path("a.py").write_text("import torch\n")
    assert cli.main(["check", "a.py"]) == 2
    told = f"pyproject.toml:{line}: tool.precisionlint must be a table, [tool.precisionlint], not {given}\n"
    assert capsys.readouterr().err.endswith(told)


def test_a_configuration_that_is_a_link_to_nothing_is_said(capsys):
    write("train.py")
    Path("precisionlint.toml").symlink_to("gone.toml")
    assert cli.main(["check", "train.py"]) == 2
    assert capsys.readouterr().err.endswith(
        "precisionlint.toml: a link to nothing: mend or remove it, or pass --isolated\n"
    )
    assert cli.main(["check", "train.py", "--isolated"]) == 1


def test_the_least_confidence_is_shown_whoever_gave_it(capsys):
    for options, least in (
        ((), "likely"),
        (("--select", "all"), "possible"),
        (("--min-confidence", "certain"), "certain"),
    ):
        assert cli.main(["check", ".", "--isolated", "--show-settings", *options]) == 0
        assert f'min-confidence = "{least}"\n' in capsys.readouterr().out


def test_settings_are_shown_as_the_toml_that_gives_them(capsys):
    write("train.py")
    pyproject(
        'ignore = ["tf32-off"]\nassume = { "args.fp16" = true }\ndevice = "cuda"\ntorch-version = ">=2.4"\n'
        'frameworks = { "lab.Engine" = "accelerate.Accelerator" }\n[tool.precisionlint.severity]\nall = "info"\n'
    )
    assert cli.main(["check", "train.py", "--show-settings", "--extend-exclude", 'a"b']) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# from {Path.cwd()}/pyproject.toml\n")
    assert 'ignore = ["tf32-off"]' in out
    again = write("copy/precisionlint.toml", out)
    settings = read(again)
    assert settings is not None
    original = Configuration({"extend_exclude": ('a"b',)}).of(Path("train.py"))
    assert shown(settings)[1:] == shown(original)[1:]


def test_every_setting_can_be_written_in_a_file():
    own = {name.replace("_", "-") for name in Settings.__struct_fields__} - {"base", "source"}
    assert own == set(KEYS)


def test_the_audit_reads_the_same_configuration(tmp_path: Path):
    pytest.importorskip("torch")
    pyproject("selct = []\n")
    write("train.py", "print(1)\n")
    command = [sys.executable, "-m", "precisionlint", "audit", "train.py"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "did you mean 'select'" in ran.stderr


def test_the_audits_policy_may_stand_in_either_file():
    write("precisionlint.toml", '[policy]\nsoftmax = { input = "float32" }\n')
    (override,) = policy.of_project(Path.cwd()).overrides
    assert (override.target, override.requires) == ("softmax", {"input": "float32"})
    Path("precisionlint.toml").unlink()
    pyproject('[tool.precisionlint.policy]\nsoftmax = { input = "float16" }\n')
    (override,) = policy.of_project(Path.cwd()).overrides
    assert override.requires == {"input": "float16"}


def test_the_settings_of_the_readme_can_be_used():
    readme = (Path(precisionlint.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    shown_there = re.findall(r"^```toml\n(\[tool\.precisionlint.+?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(shown_there) == 2
    for text in shown_there:
        write("pyproject.toml", text)
        settings = read(Path("pyproject.toml"))
        assert settings is not None
        policy.of_project(Path.cwd())
