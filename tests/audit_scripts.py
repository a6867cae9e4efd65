"""Scripts that several tests run under ``precisionlint audit``, and what such a run gives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

TRAINER = """\
import argparse
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--unscale", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=args.fp16)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
for step in range(args.steps):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=args.fp16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if args.unscale:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print("trained step", step + 1, __name__, sys.argv[1:])
print("the script's end")
"""
CLIP_LINE = TRAINER[: TRAINER.index("    clip_grad_norm_")].count("\n") + 1
JSON = ("--format", "json")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Audit(Protocol):
    def __call__(self, source: str, *arguments: str, options: tuple[str, ...] = ()) -> Ran: ...
