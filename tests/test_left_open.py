"""Methods that a class leaves to others: what trains around them is followed."""

from pathlib import Path

import pytest

from precisionlint import check

TRAINER = """
import abc
import torch


class Trainer(abc.ABC):
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    {decorator}
    def loss(self, batch):
        {body}

    def fit(self, loader):
        for batch in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.loss(batch)
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
"""


@pytest.mark.parametrize(
    ("decorator", "body", "told"),
    [
        ("", "raise NotImplementedError", True),
        ("", '"""The loss under autocast."""\n        raise NotImplementedError("autocast")', True),
        ("", 'says = "autocast: left to subclasses"\n        raise NotImplementedError(says)', True),
        ("", 'says = f"{type(self)} has no autocast"\n        raise NotImplementedError(says)', True),
        ("", "raise NotImplemented  # autocast", True),
        ("@abc.abstractmethod", "torch.autocast('cuda')\n        raise NotImplementedError", True),
        ("@abc.abstractmethod", 'raise ValueError("autocast")', True),
        ("@abc.abstractmethod", '"""The loss under autocast."""', True),
        ("", 'torch.autocast("cuda")\n        raise ValueError("never")', False),
    ],
)
def test_what_trains_around_a_method_that_is_left_open(tmp_path: Path, decorator: str, body: str, told: bool) -> None:
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER.format(decorator=decorator or "# none", body=body))
    found = check([program.as_posix()], select=["clip-before-unscale"]).findings
    assert [each.rule for each in found] == ["clip-before-unscale"] * told
