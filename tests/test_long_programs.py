"""Long programs are read to their end: what cannot matter in them is passed over, and what can is not."""

from pathlib import Path

import pytest

from precisionlint import check
from precisionlint.source.project import Project

TRAINER = """
import torch
from boxes import suppress, scale_boxes, plot


def {name}(model, loader, half=True, verbose=False, save_json=False, plots=False):
    if half:
        model.half()
    names, seen, stats, rows = model.names, 0, [], []
    for index, (images, targets) in enumerate(loader):
        images = images.half() if half else images.float()
        with torch.no_grad():
            out = model(images)
            if verbose:
                out = suppress(out)
        for number, found in enumerate(out):
            labels = targets[targets[:, 0] == number, 1:]
            kind = labels[:, 0].tolist() if len(labels) else []
            seen += 1
            if len(found) == 0:
                if len(labels):
                    stats.append((torch.zeros(0), kind))
                continue
            found = scale_boxes(found) if verbose else found
            hits = torch.zeros(found.shape[0], dtype=torch.bool)
            if len(labels):
                for each in torch.unique(kind):
                    for one in found[(each == kind).nonzero()]:
                        if one not in hits:
                            hits[one] = True
                            if len(hits) == len(labels):
                                break
            if save_json:
                rows.append(found.tolist())
            stats.append((hits.cpu(), found[:, 4].cpu(), kind))
        if plots and index < 3:
            plot(images, targets, names)
    model.float()
    return seen / len(loader)


def train(model, loader, batches, epochs, warm, quad, save, rank, half):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    best = 0.0
    for epoch in range(epochs):
        for step, (images, targets) in enumerate(loader):
            if step < warm:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * step / warm
                    if "momentum" in group:
                        group["momentum"] = 0.9
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(images, targets)
                if rank != -1:
                    loss *= 2
                if quad:
                    loss *= 4.0
            scaler.scale(loss).backward()
            if step % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        if rank in (-1, 0):
            last = epoch + 1 == epochs
            if save or last:
                fitness = {name}(model, batches, half=half, plots=False)
                if fitness > best:
                    best = fitness
            if last:
                fitness = {name}(model, batches, half=half, plots=True)
            torch.save({{"optimizer": optimizer.state_dict(), "best": best}}, "last.pt")
    return {name}(model, batches, half=half)
"""


def read(path: Path, name: str) -> tuple[set[str], list[str]]:
    """What is found, and what reading gave up on."""
    path.write_text(TRAINER.format(name=name))
    report = check([path.as_posix()], select=["all"])
    return {each.rule for each in report.findings}, [each.what for each in report.coverage.gave_up]


def test_an_evaluation_costs_no_paths(tmp_path: Path) -> None:
    assert read(tmp_path / "train.py", name="val") == ({"scaler-not-checkpointed"}, [])


def test_a_function_that_says_nothing_of_evaluation_is_followed(tmp_path: Path) -> None:
    assert read(tmp_path / "train.py", name="run") != ({"scaler-not-checkpointed"}, [])


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("print(len(images))", False),
        ("advance(chooser)", True),
        ("for _ in range(2):\n            advance(chooser)", True),
    ],
)
def test_a_loop_that_calls_what_trains_is_run(tmp_path: Path, loop: str, steps: bool) -> None:
    (tmp_path / "train.py").write_text(f"""
import torch


def advance(chooser):
    chooser.step()


def validate(model, batches, chooser):
    for images in batches:
        {loop}


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for images in batches:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images).mean()
        scaler.scale(loss).backward()
        validate(model, batches, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""")
    found = {each.rule for each in check([(tmp_path / "train.py").as_posix()]).findings}
    assert ("step-bypasses-scaler" in found) is steps


@pytest.mark.parametrize(
    ("loop", "weights"),
    [
        ("for index, images in enumerate(batches):\n        total += index", "fp32"),
        ("for index, images in enumerate(batches):\n        model.half()", "half"),
        ("for net in (model,):\n        net.half()", "half"),
    ],
)
def test_a_loop_that_casts_the_model_is_run(tmp_path: Path, loop: str, weights: str) -> None:
    (tmp_path / "train.py").write_text(f"""
import torch


def evaluate(model, batches):
    total = 0
    {loop}
    return total


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for images in batches:
        evaluate(model, batches)
        model(images).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""")
    found = {each.rule for each in check([(tmp_path / "train.py").as_posix()]).findings}
    assert found == ({"bf16-only-weights", "adam-epsilon-underflow"} if weights == "half" else set())


NAMES = """
import thop
import torch
from blocks import Mixer, Router
from tools import timed


class Detect(torch.nn.Module):
    pass


class Head(torch.nn.Module):
    pass


def profile(model, x):
    return model(x)


def step(model):
    return model


def asked({parameters}):
    {body}
"""


@pytest.mark.parametrize(
    ("parameters", "body", "meant"),
    [
        ("model, x", "return profile(model, x)", {"profile"}),
        ("model, x, profile=False", "return model(x) if profile else x", set()),
        ("model, x, step=step", "return step(model)", {"step"}),
        ("model, x", "return thop.profile(model, x)", {"thop"}),
        ("model, x", "return thop.\\\n        profile(model, x)", {"thop"}),
        ("model, x", "return torch.ops.aten.step(x)", {"torch"}),
        ("model, x", "return timed.step(x)", {"timed", "step"}),
        ("model, x", "return model.step(x)", {"step"}),
        ("model, x", "return model[0].step(x)", {"step"}),
        ("model, x", "return x if isinstance(model, Detect) else model(x)", set()),
        ("model, x", "return x if isinstance(model, (Detect, Mixer)) else model(x)", set()),
        ("model, x", "return x if isinstance(model, Detect) else Head()(x)", {"Head"}),
        ("model, x", "return [isinstance(model, Detect), Detect()(x)]", {"Detect"}),
        ("model, Router", "return Router(x)", set()),
        ("model, x", "def inner(profile):\n        return profile\n    return inner(x)", {"inner"}),
        ("model, x", "def inner(profile):\n        return profile\n    return inner(profile)", {"inner", "profile"}),
        ("model, x", "return profiled(step_size)", set()),
    ],
)
def test_what_a_function_names(tmp_path: Path, parameters: str, body: str, meant: set[str]) -> None:
    """``tools`` is a file of the project; ``thop`` and ``torch`` are not."""
    (tmp_path / "tools.py").write_text("import torch\n\n\ndef timed(x):\n    return x.backward()\n")
    (tmp_path / "net.py").write_text(NAMES.format(parameters=parameters, body=body))
    module = Project(tmp_path).load(tmp_path / "net.py")
    assert module is not None
    [definition] = module.outline.definitions["asked"]
    assert module.outline.named(definition) - {"asked"} == meant
