"""Two gloo ranks under torchrun: the collectives of DDP and FSDP2 show with their dtypes, and each rank writes its own
report.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

TRAINER = """\
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import precisionlint

dist.init_process_group("gloo")
torch.manual_seed(0)
for kind in ("ddp", "fsdp2"):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        with precisionlint.audit(model, optimizer) as audit:
            model(torch.randn(4, 8)).float().square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    audit.report.save(f"{kind}-{dist.get_rank()}.json")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(TRAINER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def collectives(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(op["op"], op["outputs"][0]) for op in report["ops"] if op["phase"] == "collective"}


def test_each_rank_writes_its_report_and_none_finds_anything(reports: dict[str, Any]):
    assert set(reports) == {"ddp-0", "ddp-1", "fsdp2-0", "fsdp2-1"}
    assert all(report["ok"] and report["findings"] == [] for report in reports.values())


def test_ddp_reduces_its_gradients_in_fp32(reports: dict[str, Any]):
    assert ("c10d::allreduce_", "float32") in collectives(reports["ddp-0"])


def test_fsdp2_gathers_weights_in_the_policys_dtype_and_reduces_in_its_own(reports: dict[str, Any]):
    found = collectives(reports["fsdp2-1"])
    assert ("c10d::_allgather_base_", "bfloat16") in found
    assert ("c10d::_reduce_scatter_base_", "float32") in found


def test_the_sharded_clip_is_seen_and_storage_is_counted_by_this_ranks_part(reports: dict[str, Any]):
    report = reports["fsdp2-0"]
    assert "gradients: clip (clip_grad_norm_)" in [station["what"] for station in report["order"]]
    weights = sum(each["bytes"] for each in report["storage"] if each["kind"] == "weights")
    assert weights == 4 * (8 * 16 + 16 + 16 * 4 + 4) / 2
