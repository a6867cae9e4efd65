"""Configuration files: read as their frameworks read them, every part at its place, and never at the cost of the other files."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from precisionlint import catalogue, check
from precisionlint.findings import Report
from precisionlint.source.parsing import UnreadableError
from precisionlint.source.project import Project
from precisionlint.subjects import File, yaml_trees
from precisionlint.subjects.tree import Table
from precisionlint.subjects.yaml_trees import documents

DEEPSPEED = '{"train_batch_size": 8, "bf16": {"enabled": true, "loss_scale": 0}}'


def report(path: Path, text: str) -> Report:
    path.write_text(text, encoding="utf-8")
    return check([str(path)], select=catalogue.load())


def file(text: str, name: str) -> File:
    return File(name, Path(name), text.encode(), Project(Path()))


def table(text: str, name: str = "a.json") -> Table:
    (document,) = documents(file(text, name))
    assert isinstance(document, Table)
    return document


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": {"c": "bf16"}}',
        '{\n\t"a": 1,\n\t"b": {"c": "bf16"}\n}',
        '{ // one\n"a": 1, /* two\n lines */ "b": {"c": "bf16",},\n# three\n}',
        '{"a": 2, "a": 1, "b": {"c": "bf16"}}',
        '{"a": 1, "url": "http://x//y", "emoji": "\\ud83d\\ude00\\u00e9", "b": {"c": "bf16"}}',
        '\ufeff{"a": 1, "b": {"c": "bf16"}}',
    ],
)
@pytest.mark.parametrize("loader", ["SafeLoader", "CSafeLoader"])
def test_json_is_read_with_what_people_put_into_it(text: str, loader: str, monkeypatch: pytest.MonkeyPatch):
    if not hasattr(yaml, loader):
        pytest.skip("this PyYAML comes without libyaml")
    monkeypatch.setattr(yaml_trees, "LOADER", getattr(yaml, loader))
    read = table(text)
    a, c = read.setting("a"), read.setting("b.c")
    assert a is not None and c is not None
    assert (a.value, c.value, c.name, c.half) == (1, "bf16", "b.c", "bf16")
    line = text.lstrip("\ufeff").split("\n")[c.at.line - 1]
    assert line[c.at.column - 1 : c.at.end_column - 1] == '"c": "bf16"'


def test_yaml_is_read_with_anchors_merges_and_numbers_as_strings():
    read = table("base: &base {lr: 1e-5, bf16: on}\nrun:\n  <<: *base\n  lr: 3e-4\nself: &s [*s]\n", "a.yaml")
    rate, switch = read.setting("run.lr"), read.setting("run.bf16")
    assert rate is not None and switch is not None
    assert (rate.number, rate.at.line, switch.value, switch.at.line) == (3e-4, 4, True, 1)


def test_a_scale_is_judged_only_where_fp16_is_known_to_be_on(tmp_path: Path):
    for switch, found in (("true", 1), ('"auto"', 0), ("false", 0)):
        text = f'{{"train_batch_size": 8, "fp16": {{"enabled": {switch}, "loss_scale": 1}}}}'
        assert len(report(tmp_path / "a.json", text).findings) == found


def test_characters_are_counted_not_bytes():
    setting = table('{"\u00e4\u00f6": "\U0001f600", "c": 1}').setting("c")
    assert setting is not None
    assert setting.at.column == 13


@pytest.mark.parametrize(("name", "text", "line"), [("a.json", '{\n"a": [1\n}', 3), ("a.yaml", "a:\n  - b\n c", 3)])
def test_what_cannot_be_parsed_is_named_with_its_line(name: str, text: str, line: int):
    with pytest.raises(UnreadableError) as error:
        table(text, name)
    assert error.value.line == line
    assert error.value.message.startswith("not ")


@pytest.mark.parametrize("text", ['{"stage": ${stage}, "b": }', "a: {{ b }}\n{% if c %}\n", "- <%= x %>: ]"])
def test_a_template_is_no_configuration_yet(text: str):
    for name in ("a.json", "a.yaml"):
        assert documents(file(text, name)) == []


def test_json_that_yaml_does_not_bear_is_left_alone():
    assert documents(file('{"' + "k" * 2000 + '": 1}', "a.json")) == []


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 5_000 + "]" * 5_000, "a: &a\n" + "- &b [*a]\n" * 3])
def test_deep_nesting_and_strange_aliases_end_in_one_line(tmp_path: Path, text: str):
    done = report(tmp_path / "a.yaml", f"# bf16 enabled loss_scale\n{text}")
    assert done.findings == ()
    assert len(done.errors) == 1 and "internal" not in done.errors[0].message


def test_a_broken_configuration_does_not_hide_the_findings_of_the_others(tmp_path: Path):
    (tmp_path / "broken.json").write_text('{"bf16": {"enabled": true')
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    (tmp_path / "data.json").write_text('{"words": ["nothing", "of", "ours"]}')
    done = check([str(tmp_path)], select=catalogue.load())
    assert [Path(error.path).name for error in done.errors] == ["broken.json"]
    assert [(finding.rule, Path(finding.place.path).name) for finding in done.findings] == [
        ("deepspeed-precision-config", "ds.json")
    ]
    assert (done.coverage.files, done.coverage.read) == (2, 1)


def test_a_setting_is_reported_once_however_often_it_is_used(tmp_path: Path):
    done = report(tmp_path / "a.yaml", f"one: &ds {DEEPSPEED}\ntwo: *ds\n")
    assert len(done.findings) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("gradient_accumulation_steps: 16\nbf16: {enabled: true}", True),
        ("gradient_accumulation_steps: 4\nbfloat16: {enabled: true}\nzero_optimization: {stage: 3}", True),
        ("gradient_accumulation_steps: 16\nbf16: {enabled: true}\ndata_types: {grad_accum_dtype: fp32}", False),
        ("gradient_accumulation_steps: 16\nbf16: {enabled: false}", False),
        ("gradient_accumulation_steps: 2\nbf16: {enabled: true}", False),
        ("gradient_accumulation_steps: auto\nbf16: {enabled: true}", False),
        ("gradient_accumulation_steps: 16\nfp16: {enabled: true}", False),
        (
            "gradient_accumulation_steps: 16\nbf16: {enabled: true}\nzero_optimization: {stage: 2, offload_optimizer: {device: cpu}}",
            False,
        ),
    ],
)
def test_sums_in_the_dtype_that_deepspeed_takes_by_itself_are_possible(tmp_path: Path, more: str, told: bool):
    path = tmp_path / "ds.yaml"
    path.write_text(f"train_micro_batch_size_per_gpu: 2\n{more}\n")
    shown = check([str(path)], select=["half-gradient-accumulation"], isolated=True, min_confidence="possible")
    assert [(each.rule, each.confidence) for each in shown.findings] == [
        ("half-gradient-accumulation", "possible")
    ] * told
    assert check([str(path)], isolated=True).findings == ()


LAUNCHER = """
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
mixed_precision: {dtype}
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: {steps}
  {more}
"""


@pytest.mark.parametrize(
    ("kind", "dtype", "steps", "more", "told"),
    [
        ("DEEPSPEED", "bf16", 8, "offload_optimizer_device: none", True),
        ("DEEPSPEED", "bf16", 4, "zero3_init_flag: false", True),
        ("DEEPSPEED", "bf16", 8, "offload_optimizer_device: cpu", False),
        ("DEEPSPEED", "bf16", 8, "deepspeed_config_file: zero.json", False),
        ("DEEPSPEED", "bf16", 2, "zero3_init_flag: false", False),
        ("DEEPSPEED", "fp16", 8, "zero3_init_flag: false", False),
        ("MULTI_GPU", "bf16", 8, "zero3_init_flag: false", False),
    ],
)
def test_sums_of_a_launcher_that_hands_them_to_deepspeed_are_possible(
    tmp_path: Path, kind: str, dtype: str, steps: int, more: str, told: bool
):
    path = tmp_path / "launch.yaml"
    path.write_text(LAUNCHER.format(kind=kind, dtype=dtype, steps=steps, more=more))
    shown = check([str(path)], select=["half-gradient-accumulation"], isolated=True, min_confidence="possible")
    assert [each.confidence for each in shown.findings] == ["possible"] * told


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"gradient_accumulation_steps": 8, "bf16": {"enabled": True}}', True),
        ("{'gradient_accumulation_steps': 8, 'bf16': {'enabled': True}, 'zero_optimization': {'stage': 1}}", True),
        ('{"gradient_accumulation_steps": args.steps, "bf16": {"enabled": True}}', False),
        ('{"gradient_accumulation_steps": 8, "bf16": {"enabled": args.bf16}}', False),
        ('{"gradient_accumulation_steps": 8, "fp16": {"enabled": True}}', False),
    ],
)
def test_sums_of_a_dict_that_deepspeed_is_given_are_possible(tmp_path: Path, written: str, told: bool):
    path = tmp_path / "train.py"
    path.write_text(
        f"import deepspeed\n\n\ndef engine(model, args):\n    return deepspeed.initialize(model, config={written})\n"
    )
    shown = check([str(path)], select=["half-gradient-accumulation"], isolated=True, min_confidence="possible")
    assert [each.confidence for each in shown.findings] == ["possible"] * told


def test_a_comment_silences_a_finding_in_a_configuration_too(tmp_path: Path):
    switch, sums = (
        "# precisionlint: ignore[half-gradient-accumulation] small runs",
        "data_types: {grad_accum_dtype: bf16}",
    )
    head = "train_batch_size: 8\ngradient_accumulation_steps: 8\nbf16: {enabled: true}\n"
    for text in (f"{head}{sums}  {switch}\n", f"{head}{switch}\n\n# one more\n{sums}\n"):
        done = report(tmp_path / "a.yaml", text)
        assert (done.findings, [each.reason for each in done.suppressed]) == ((), ["small runs"])
    (left, unused) = report(tmp_path / "a.yaml", f"{head}{sums}\nother: 1  {switch}\n").findings
    assert (left.rule, unused.rule) == ("half-gradient-accumulation", "unused-ignore")
    whole = "# precisionlint: ignore-file[half-gradient-accumulation] small runs"
    assert report(tmp_path / "a.yaml", f"{whole}\n{head}{sums}\n").findings == ()
    script = f"torchrun pretrain.py --bf16 --grad-reduce-in-bf16  {switch}\n"
    assert report(tmp_path / "a.sh", script).findings == ()


@pytest.mark.parametrize(("text", "imported"), [(DEEPSPEED, True), ('{"enabled": true, "words": ["bf1", "6"]}', False)])
def test_a_parser_is_imported_only_for_a_file_that_can_hold_something(tmp_path: Path, text: str, imported: bool):
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "train.py").write_text("import torch\n\nscaler = torch.amp.GradScaler()\n")
    code = f"import sys; from precisionlint import check; check([{str(tmp_path)!r}]); print('yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{imported}\n"


RECIPE = """
model:
  _target_: {loads}
  torch_dtype: {dtype}
optimizer:
  _target_: {optimizer}
  lr: 1e-5
{rest}
"""


@pytest.mark.parametrize(
    ("loads", "dtype", "optimizer", "rest", "told"),
    [
        ("nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained", "torch.bfloat16", "torch.optim.AdamW", "", True),
        ("transformers.AutoModelForCausalLM.from_pretrained", "float16", "torch.optim.Adam", "seed: 1", True),
        ("transformers.AutoModelForCausalLM.from_pretrained", "float32", "torch.optim.Adam", "", False),
        ("house.models.Encoder", "bfloat16", "torch.optim.Adam", "", False),
        ("nemo_automodel.NeMoAutoModelForCausalLM.from_config", "bf16", "house.optim.Kahan", "", False),
        ("nemo_automodel.NeMoAutoModelForCausalLM.from_config", "bf16", "torch.optim.SGD", "peft:\n  dim: 8", False),
        ("nemo_automodel.NeMoAutoModelForCausalLM.from_config", "bf16", "torch.optim.SGD", "distributed:\n  strategy: megatron_fsdp", False),
    ],
)  # fmt: skip
def test_what_a_target_loads_in_half_under_a_plain_optimizer_is_likely(
    tmp_path: Path, loads: str, dtype: str, optimizer: str, rest: str, told: bool
):
    text = RECIPE.format(loads=loads, dtype=dtype, optimizer=optimizer, rest=rest)
    found = [(each.rule, each.confidence, each.place.line) for each in report(tmp_path / "a.yaml", text).findings]
    assert found == ([("bf16-only-weights", "likely", 4)] if told else [])
