"""The settings in force are read through the old and the new switches, and said in terms of the products that ran."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from audit_cases import batch, net
from msgspec.structs import replace

import precisionlint
from precisionlint.audit_report import AuditReport, OpRecord
from precisionlint.trace import settings

PRODUCT = OpRecord("mm", "forward", "", None, ("float32",) * 2, "float32", ("float32",), 3, family="matmul")
CUDA = "torch.backends.cuda.matmul."


def said(**values: str) -> list[str]:
    """What settings (of CUDA's products) mean for three products on CUDA in fp32, and three in each half."""
    products = [replace(PRODUCT, device="cuda", inputs=(dtype,)) for dtype in ("float32", "bfloat16", "float16")]
    return list(settings.meaning({CUDA + name: value for name, value in values.items()}, products))


def test_fp32_products_on_cuda_run_in_tf32_by_the_new_switch_or_the_old_one():
    full = "3 fp32 products on CUDA run in full fp32, outside the tensor cores"
    assert said(fp32_precision="none", allow_tf32="False") == [full]
    assert said(fp32_precision="ieee") == [full]
    for switch in ({"fp32_precision": "tf32"}, {"fp32_precision": "none", "allow_tf32": "True"}):
        assert said(**switch) == ["3 fp32 products on CUDA run in TF32"]


def test_a_switch_that_says_nothing_follows_the_one_above_it():
    products = [replace(PRODUCT, device="cuda")]
    values = {"torch.backends.fp32_precision": "tf32", CUDA + "fp32_precision": "none"}
    assert list(settings.meaning(values, products)) == ["3 fp32 products on CUDA run in TF32"]


def test_convolutions_follow_cudnns_switch():
    values = {"torch.backends.cudnn.conv.fp32_precision": "tf32", CUDA + "fp32_precision": "ieee"}
    ops = [replace(PRODUCT, device="cuda", op="convolution"), replace(PRODUCT, device="cuda")]
    assert list(settings.meaning(values, ops)) == [
        "3 fp32 products on CUDA run in full fp32, outside the tensor cores",
        "3 fp32 convolutions on CUDA run in TF32",
    ]


def test_reduced_precision_reductions_are_said_of_the_dtypes_that_ran():
    assert "3 bf16 products on CUDA may add partial sums in bf16" in said(
        allow_bf16_reduced_precision_reduction="(True, True)"
    )
    assert "3 fp16 products on CUDA may accumulate in fp16" in said(allow_fp16_accumulation="True")
    assert len(said(allow_bf16_reduced_precision_reduction="False")) == 1


def test_what_did_not_run_is_not_said():
    assert list(settings.meaning({CUDA + "fp32_precision": "tf32"}, [])) == []


def step() -> AuditReport:
    model = net()
    with precisionlint.audit(model) as audit:
        model(batch()[0]).sum().backward()
    return audit.report


@pytest.fixture
def restored() -> Iterator[None]:
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


@pytest.mark.usefixtures("restored")
def test_the_legacy_setter_is_read_and_means_bf16_for_the_cpus_products():
    assert step().meaning == ("8 fp32 products on the CPU run in fp32",)
    torch.set_float32_matmul_precision("medium")
    report = step()
    assert report.settings["torch.get_float32_matmul_precision()"] == "medium"
    assert report.settings[CUDA + "allow_tf32"] == "True"
    assert report.meaning == ("8 fp32 products on the CPU may run in bf16",)


NEW = """\
import torch, precisionlint
torch.backends.fp32_precision = "tf32"
with precisionlint.audit() as audit:
    torch.ones(2, 2) @ torch.ones(2, 2)
print(audit.report.settings["torch.backends.cuda.matmul.fp32_precision"])
print(audit.report.settings["torch.get_float32_matmul_precision()"])
torch.backends.cuda.matmul.fp32_precision = "ieee"
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 brought the new switches")
def test_a_legacy_setting_that_raises_since_a_new_one_was_set_is_said_in_its_place():
    done = subprocess.run([sys.executable, "-W", "error", "-c", NEW], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["tf32", "not readable: fp32_precision was set"], done.stderr


@pytest.mark.usefixtures("restored")
def test_a_setting_that_the_step_changes_is_named():
    with precisionlint.audit() as audit:
        torch.set_default_dtype(torch.bfloat16)
    assert audit.report.notes == ("torch.get_default_dtype() changed in the step, from float32 to bfloat16",)
    assert audit.report.meaning == ("tensors made without a dtype are bfloat16: counters, tables and buffers too",)


def test_regions_are_told_with_device_dtype_cache_and_line():
    with (
        precisionlint.audit() as audit,
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        torch.ones(2)
    regions = [each.partition(" at ")[0] for each in audit.report.regions]
    assert regions == ["cpu bfloat16, weight cache off", "disabled"]
    assert all("test_audit_settings.py:" in each for each in audit.report.regions)
