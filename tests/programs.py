"""A training program with one fault in one line, and the same without it."""

CLIP_LINE = 17
CLIP = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.set_float32_matmul_precision("high")


def train(loader):
    model = nn.Linear(64, 10).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
"""Its only finding is clip-before-unscale in line ``CLIP_LINE``."""
CLIP_CALL = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
SOUND = CLIP.replace(CLIP_CALL, f"scaler.unscale_(optimizer)\n        {CLIP_CALL}")
