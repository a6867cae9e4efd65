"""Two gloo ranks under torchrun: the collectives of DDP and FSDP2 show with their dtypes, and each rank writes its own
report.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from precisionlint import catalogue

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


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)


def side_by_side(folder: Path, *arguments: str) -> None:
    """Two ranks without a launcher, which would import torch a third time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, *arguments], cwd=folder, env={**os.environ, **where, "RANK": str(rank)})
        for rank in range(2)
    ]
    for each in ranks:
        each.wait()


def written(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(TRAINER)
    done = torchrun(folder, "train.py")
    assert done.returncode == 0, done.stderr
    return written(folder)


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


def test_collectives_stand_in_the_order_of_the_step_with_their_dtype(reports: dict[str, Any]):
    def between(kind: str, first: str, last: str) -> list[str]:
        told = [station["what"] for station in reports[f"{kind}-1"]["order"]]
        start = told.index(first) + 1 if first else 0
        return told[start : told.index(last, start)]

    assert between("ddp", "backward", "gradients: clip (clip_grad_norm_)") == ["allreduce of float32"]
    assert set(between("fsdp2", "", "backward")) == {"allgather_base of bfloat16"}
    assert between("fsdp2", "backward", "gradients: clip (clip_grad_norm_)")[-1] == "reduce_scatter_base of float32"
    assert not any("wrap" in station["what"] for station in reports["fsdp2-1"]["order"])  # it sends nothing


def test_the_sharded_clip_is_seen_and_storage_is_counted_by_this_ranks_part(reports: dict[str, Any]):
    report = reports["fsdp2-0"]
    assert "gradients: clip (clip_grad_norm_)" in [station["what"] for station in report["order"]]
    weights = sum(each["bytes"] for each in report["storage"] if each["kind"] == "weights")
    assert weights == 4 * (8 * 16 + 16 + 16 * 4 + 4) / 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_that_do_the_same_are_said_to(reports: dict[str, Any], kind: str, rank: int):
    said = f"rank {rank} of 2: 1 other rank compared, with the same settings and dtypes"
    assert said in reports[f"{kind}-{rank}"]["notes"]


SCENARIOS = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import precisionlint

dist.init_process_group("gloo")
rank = dist.get_rank()


def step(name, dtype=None, fails=False):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = precisionlint.audit(model, optimizer)
    try:
        with audit:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(4, 8)).float().square().mean()  # the forward
            loss.backward()
            if fails:
                raise ValueError("of this rank alone")
            optimizer.step()
    except ValueError:
        pass
    audit.report.save(f"{name}-{rank}.json")


step("autocast", torch.bfloat16 if rank == 1 else None)
torch.set_float32_matmul_precision("high" if rank == 1 else "highest")
step("setting")
torch.set_float32_matmul_precision("highest")
step("raises", fails=rank == 1)
if rank == 0:
    with precisionlint.audit() as alone:
        torch.ones(2).sum()
    alone.report.save("alone-0.json")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("scenarios")
    (folder / "train.py").write_text(SCENARIOS)
    done = torchrun(folder, "train.py")
    assert done.returncode == 0, done.stderr
    return written(folder)


def told(report: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(each["rule"], each["line"], each["message"]) for each in report["findings"]]


def test_a_rank_under_autocast_differs_from_one_without_at_the_line_of_the_forward(scenarios: dict[str, Any]):
    line = SCENARIOS[: SCENARIOS.index("# the forward")].count("\n") + 1
    for rank, other, here, there in ((0, 1, "float32", "bfloat16"), (1, 0, "bfloat16", "float32")):
        found = told(scenarios[f"autocast-{rank}"])
        assert {each[:2] for each in found} == {("ranks-differ", line)}
        assert f"rank {other} differs from rank {rank} in addmm of" in found[0][2]
        assert found[0][2].index(f"{there} {there}") < found[0][2].index(f"{here} {here}")


def test_a_setting_that_differs_is_named_with_both_values(scenarios: dict[str, Any]):
    ((rule, _, message),) = told(scenarios["setting-0"])
    assert rule == "ranks-differ"
    assert (
        "rank 1 differs from rank 0 in torch.backends.cuda.matmul.allow_tf32: True where this rank has False" in message
    )


def test_a_rank_whose_step_raised_or_that_is_not_audited_is_named_and_not_waited_for(scenarios: dict[str, Any]):
    assert "the step of rank 1 raised" in scenarios["raises-0"]["notes"]
    assert scenarios["raises-1"]["error"] == "ValueError: of this rank alone"
    assert "rank 1 was not audited" in scenarios["alone-0"]["notes"]
    assert told(scenarios["raises-0"]) == told(scenarios["alone-0"]) == []


class LateStore:
    """As TCPStore (seen in every second of 60,000 tries): what is set comes some time later, what is added is there."""

    def __init__(self) -> None:
        self.there: set[str] = set()

    def set(self, key: str, value: str) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        self.there.add(key)
        return amount


def test_a_rank_that_is_audited_is_known_to_be_before_it_goes_on(monkeypatch: pytest.MonkeyPatch):
    dist = pytest.importorskip("torch.distributed")
    store = LateStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert pytest.importorskip("precisionlint.trace.ranks").meet() is not None
    assert "precisionlint/1/open/1" in store.there


COMMAND = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 4).bfloat16())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
"""


def test_the_command_under_torchrun_writes_a_report_of_each_rank_and_none_is_lost_to_the_first_that_fails(
    tmp_path: Path,
):
    (tmp_path / "train.py").write_text(COMMAND)
    arguments = ("-m", "precisionlint", "audit", "--format", "json", "--out", "report.json", "train.py")
    done = torchrun(tmp_path, *arguments)
    assert done.returncode == 1, done.stderr  # torchrun's own; each rank ended with a finding
    found = written(tmp_path)
    assert set(found) == {"report-rank0", "report-rank1"}
    for outcome in found.values():
        assert [each["rule"] for each in outcome["report"]["findings"]] == ["bf16-only-weights"]
        reductions = [op for op in outcome["report"]["ops"] if op["family"] == "gradient-reduction"]
        assert {op["verdict"] for op in reductions} == {"accumulation bfloat16 where float32 is due"}


def test_without_a_file_rank_0_prints_its_report_with_the_dtypes_of_collectives_and_others_a_line(tmp_path: Path):
    (tmp_path / "train.py").write_text(COMMAND.replace(".bfloat16()", "").replace("lr=1e-5", "lr=0.1"))
    done = torchrun(tmp_path, "-m", "precisionlint", "audit", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("audit of train.py, step 2: found nothing") == 1
    assert re.search(r"fwd +bwd +optim +coll +FLOPs", done.stdout)
    assert re.search(r"\n  gradient-reduction +fp32 +1\n", done.stdout)
    assert "reads a tensor" not in done.stdout  # DDP's own counters
    assert "precisionlint: rank 1: audit of train.py, step 2: found nothing" in done.stderr


EXAMPLES = catalogue.examples(catalogue.load()["ranks-differ"])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each.kind}-at-{each.line}")
def test_an_example_of_the_page_gives_on_two_ranks_what_it_marks(example: Any, tmp_path: Path):
    (tmp_path / "train.py").write_text(example.code.replace('"nccl"', '"gloo"').replace('"cuda"', '"cpu"'))
    side_by_side(tmp_path, "-m", "precisionlint", "audit", "--format", "json", "--out", "report.json", "train.py")
    found = written(tmp_path)
    assert len(found) == 2
    for outcome in found.values():
        assert {(each["line"], each["rule"]) for each in outcome["report"]["findings"]} == set(example.marks)
