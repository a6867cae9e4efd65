"""Regions that are made and never entered, as a with or a line by itself spells them."""

from pathlib import Path

import pytest

from precisionlint import check

AMP = 'torch.autocast("cuda")'


def found(path: Path, line: str) -> list[tuple[str, str, str]]:
    path.write_text(
        "import contextlib\n\nimport torch\nfrom torch.amp import autocast\n\n\n"
        f"def step(model, x, accelerator, given, half, amp_autocast):\n    {line}\n        return model(x)\n"
    )
    report = check([path.as_posix()], select=["autocast-not-entered"])
    assert not report.errors
    return [(each.message, each.severity, each.confidence) for each in report.findings]


@pytest.mark.parametrize(
    ("line", "lost", "entered"),
    [
        (f"with {AMP} and torch.no_grad():", "torch.autocast(…)", "torch.no_grad()"),
        (f"with torch.no_grad() or {AMP}:", "torch.autocast(…)", "torch.no_grad()"),
        (f"with {AMP} and torch.cuda.device(x.device), torch.no_grad():", "torch.autocast(…)", "torch.cuda.device(…)"),
        ('with autocast("cuda") and torch.inference_mode():', "autocast(…)", "torch.inference_mode()"),
        ("with accelerator.autocast() and torch.no_grad():", "accelerator.autocast()", "torch.no_grad()"),
        ("with amp_autocast() and model.no_sync():", "amp_autocast()", "model.no_sync()"),
        (f"with torch.no_grad() and {AMP} and torch.cuda.stream(x):", "torch.autocast(…)", "torch.cuda.stream(…)"),
        (f"with {AMP} and half:", None, None),  # a value that may be anything, and then be no manager
        (f"with torch.no_grad() and {AMP}:", None, None),
        (f"with given or {AMP}:", None, None),
        (f"with half and {AMP}:", None, None),
        (f"with {AMP} if half else torch.no_grad():", None, None),
        (f"with {AMP}, torch.no_grad():", None, None),
        (f"with (half and {AMP}) or contextlib.nullcontext():", None, None),
        ("with torch.no_grad() and torch.inference_mode():", None, None),
    ],
)
def test_managers_that_a_with_joins(tmp_path: Path, line: str, lost: str | None, entered: str | None) -> None:
    told = found(tmp_path / "step.py", line)
    assert [each[1:] for each in told] == ([("warning", "certain")] if lost else [])
    assert all(f"enters {entered} and not {lost}" in message for message, _, _ in told)


@pytest.mark.parametrize(
    ("line", "hits"),
    [
        (f"{AMP}\n    if half:", 1),
        ("accelerator.autocast()\n    if half:", 1),
        (f"{AMP}.__enter__()\n    if half:", 0),
        (f"given = {AMP}\n    if half:", 0),
        ("given.autocast(x)\n    if half:", 0),
        ("amp_autocast(model)\n    if half:", 0),  # a function that does something, by its name
    ],
)
def test_a_call_by_itself(tmp_path: Path, line: str, hits: int) -> None:
    assert len(found(tmp_path / "step.py", line)) == hits


def test_a_region_that_is_off_is_missed_the_other_way(tmp_path: Path) -> None:
    [(message, _, _)] = found(tmp_path / "step.py", 'with torch.autocast("cuda", enabled=False) and torch.no_grad():')
    assert "what was to run in fp32 runs in half" in message
