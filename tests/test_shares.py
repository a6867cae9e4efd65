"""What one call may cost: a part of the program around it can be too much to be followed, and its faults are found all the same."""

from __future__ import annotations

from pathlib import Path

from precisionlint import check
from precisionlint.checks import Judge, all_rules
from precisionlint.source.interpret import Interpreter
from precisionlint.source.project import Project
from precisionlint.source.reading import Reader

TRAINING = """
def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
        scaler.step(optimizer)
        scaler.update()
"""


def questions(depth: int, indent: str) -> str:
    """Tests of settings that no two paths agree in, each with a setting that precision asks for."""
    return "".join(
        f"{indent}if options.fp16_{i}:\n{indent}    options.dtype_{i} = torch.float16\n" for i in range(depth)
    )


def line_of(program: Path) -> int:
    return program.read_text().partition("  # here")[0].count("\n") + 1


def found(program: Path) -> set[tuple[str, int]]:
    report = check([program.as_posix()])
    return {(each.rule, each.place.line) for each in report.findings if each.severity != "info"}


def test_what_a_program_tries_out_first_does_not_cost_it_the_training(tmp_path: Path) -> None:
    """A benchmark that runs a backward somewhere may be long; it is no training of the program's."""
    (tmp_path / "trial.py").write_text(
        "import torch\n\n\ndef profile(model, x):\n    model(x).sum().backward()\n\n\n"
        "def trial(model, options):\n    for size in options.sizes:\n        for batch in options.batches:\n"
        + questions(300, "            ")
        + "            for repeat in options.repeats:\n"
        + questions(300, "                ")
        + "    if options.profiled:\n        profile(model, options.x)\n"
    )
    program = tmp_path / "train.py"
    program.write_text(
        "import torch\nfrom trial import trial\n"
        + TRAINING.replace(
            "(model, loader):", "(model, loader, options):\n    trial(model, options)\n    trial(model, options.other)"
        )
    )
    assert found(program) == {("clip-before-unscale", line_of(program))}


def test_a_method_that_is_too_long_does_not_cost_its_class_the_others(tmp_path: Path) -> None:
    program = tmp_path / "trainer.py"
    program.write_text(
        "import torch\n\n\nclass Trainer:\n    def __init__(self, model, options):\n        self.model = model\n"
        "        self.options = options\n        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        '        self.scaler = torch.amp.GradScaler("cuda")\n\n    def fit(self, loader, options):\n'
        "        for epoch in options.epochs:\n            for stage in options.stages:\n"
        + questions(500, "                ")
        + "                for batch in loader:\n"
        + questions(500, "                    ")
        + "                    self.scaler.scale(self.model(batch)).backward()\n"
        "                    self.scaler.step(self.optimizer)\n                    self.scaler.update()\n\n"
        "    def tune(self, loader):\n        for x, y in loader:\n            self.optimizer.zero_grad()\n"
        '            with torch.autocast("cuda", dtype=torch.float16):\n                loss = self.model(x, y)\n'
        "            self.scaler.scale(loss).backward()\n"
        "            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # here\n"
        "            self.scaler.step(self.optimizer)\n            self.scaler.update()\n"
    )
    assert ("clip-before-unscale", line_of(program)) in found(program)


HELPERS = """
import torch


def overlap(a, b):
    return (a - b).abs().sum() / (a + b).abs().sum().clamp(min=1)


def match(boxes, targets, options):
    for level in options.levels:
        for box in boxes:
            for target in targets:
                options.best = overlap(box, target) + overlap(target, box) * overlap(box, box)
    return options.best


def losses(boxes, targets, options):
    for level in options.levels:
        for box in boxes:
            for target in targets:
                for part in options.parts:
                    options.sum = match(boxes, targets, options) + match(targets, boxes, options)
    return options.sum
"""


def test_helpers_that_are_called_over_and_over_do_not_cost_a_file_its_own_ops(tmp_path: Path) -> None:
    """Value flow: what a function of another file gives is worked out once for arguments of one form."""
    (tmp_path / "helpers.py").write_text(HELPERS)
    calls = "".join(
        "            for each in options.members:\n"
        f"                total = losses(boxes, targets, options) + losses(targets, total, options) * {i}\n"
        for i in range(1, 40)
    )
    program = tmp_path / "model.py"
    program.write_text(
        "import torch\nfrom helpers import losses\n\n\ndef evaluate(boxes, targets, options):\n    total = 0.0\n"
        "    for epoch in options.epochs:\n        for batch in options.batches:\n"
        + calls
        + "    return total\n\n\ndef attend(q, k, mask):\n    scores = torch.matmul(q.half(), k.half())\n"
        "    return scores.masked_fill(mask, -1e9)  # here\n"
    )
    assert any(line == line_of(program) for _, line in found(program))


def test_what_a_remembered_call_gives_is_made_of_the_arguments_at_hand(tmp_path: Path) -> None:
    """Arguments of the same form are other values all the same; those of another dtype are of another form."""
    (tmp_path / "helpers.py").write_text("def mean_of(x):\n    return x.mean(-1)\n")
    program = tmp_path / "model.py"
    program.write_text(
        "import torch\nfrom helpers import mean_of\n\n\ndef broken(a, b):\n    a, b = a.half(), b.half()\n"
        "    other = mean_of(b)\n    return mean_of(a * a) - mean_of(a) ** 2, other  # here\n\n\n"
        "def sound(a, b):\n    a, b = a.half(), b.half()\n    other = mean_of(a)\n"
        "    return mean_of(a * a) - mean_of(b) ** 2, other\n\n\ndef wide(a, b):\n    a, b = a.float(), b.float()\n"
        "    other = mean_of(b)\n    return mean_of(a * a) - mean_of(a) ** 2, other\n"
    )
    assert found(program) == {("variance-by-difference", line_of(program))}


def test_a_method_called_through_its_class_is_remembered_by_what_it_is_called_on(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("class Scores:\n    def masked(self, mask):\n        return self[0].half()\n")
    program = tmp_path / "model.py"
    program.write_text(
        "import torch\nfrom helpers import Scores\n\n\ndef attend(q, k, mask):\n"
        "    one, two = Scores.masked((q,), mask), Scores.masked((q, k), mask)\n"
        "    return one, two.masked_fill(mask, -1e9)  # here\n"
    )
    report = check([program.as_posix()])
    assert [(each.rule, each.place.line) for each in report.findings] == [("mask-constant-overflow", line_of(program))]
    assert report.errors == ()


def steps(program: Path) -> int:
    """How many instructions reading a file took."""
    project = Project(program.parent)
    module = project.load(program)
    assert module is not None
    it = Interpreter(project, module, Judge(all_rules().values()), {})
    Reader(it, module).read()
    return it.total + it.steps


def test_a_program_that_does_not_train_is_read_on_few_paths(tmp_path: Path) -> None:
    text = (
        "import torch\n\n\ndef prepare(model, options):\n" + questions(12, "    ") + "    model.requires_grad_(False)\n"
    )
    prepares, trains = tmp_path / "prepares.py", tmp_path / "trains.py"
    prepares.write_text(text + "    if options.missing:\n        raise ValueError(options.scaler.name)\n")
    trains.write_text(text + "    model(options.x).backward()\n")
    assert 0 < 3 * steps(prepares) < steps(trains)


def test_what_only_a_reader_reads_makes_no_program(tmp_path: Path) -> None:
    program = tmp_path / "layers.py"
    said = '    """Call loss.backward(), clip_grad_norm_ and scaler.step(optimizer) after it."""\n'
    program.write_text(
        "import torch\nfrom torch import nn\n\n\ndef describe(options):\n" + said + "    # then optimizer.step()\n"
        "    shown = str(options)\n    print(shown)\n    print(options.name)\n    return nn.Linear(options.width, 1)\n\n\n"
        "class Linear(nn.Module):\n    def train_on(self, x):\n        self(x).sum().backward()\n"
    )
    assert check([program.as_posix()]).coverage.programs == 1  # the class, which trains


ASKED_FIRST = """
import torch

from parts import arguments, build, is_main


def main(args, loader):
    if not args.train and (not args.test) and (not args.predict):
        raise ValueError("nothing to do")
    model = build(args)
    if args.train:
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for x in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
            scaler.step(optimizer)
            scaler.update()
    if (args.test or args.predict) and is_main():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(arguments(), None)
"""


def test_a_program_that_asks_first_whether_it_has_anything_to_do_is_followed_to_its_training(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ASKED_FIRST)
    found = check([program.as_posix()], select=["clip-before-unscale"]).findings
    assert [each.place.line for each in found] == [line_of(program)]
