"""Models that a file casts or loads in half, and hands an optimizer: possible whatever paths lead there, and nothing of sound relatives."""

from pathlib import Path

import pytest

from precisionlint import check
from precisionlint.facts import HalfModel
from precisionlint.source.project import Project
from precisionlint.subjects import File, half_models

SCRIPT = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM

from house.engines import Engine, register
from house.nets import build, chosen_params


class Session(Engine):
    @register("fit")
    async def fit(self, options, loader):
        dtype = torch.bfloat16 if options.half else torch.float32
        tables = {{"fp16": torch.float16, "fp32": torch.float32}}
        keywords = dict(torch_dtype=torch.float16)
        {made}
        {after}
        {optimizer}
        for batch in loader:
            async with self.turn():
                self.pending = self.run(batch, optimizer)
                self.pending.backward()
                optimizer.step()
"""
ADAM = "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)"
PLAIN = "net = build(options).to(dtype)"


def read(text: str, name: str = "fit.py") -> list[tuple[int, str, str]]:
    facts = half_models.read(File(name, Path(name), text.encode(), Project(Path.cwd())))
    return [(each.at.line, each.name, each.optimizer) for each in facts]


def told(folder: Path, text: str, rule: str) -> list[tuple[int, str]]:
    (folder / "fit.py").write_text(text, encoding="utf-8")
    report = check([(folder / "fit.py").as_posix()], select=[rule], min_confidence="possible")
    assert not report.errors
    return [(each.place.line, each.confidence) for each in report.findings]


@pytest.mark.parametrize(
    ("made", "after", "optimizer"),
    [
        (PLAIN, "pass", ADAM),
        ("net = build(options)", "net.half().cuda()", ADAM),
        ("net: torch.nn.Module = build(options).to(dtype)", "pass", ADAM),
        ("net = build(options); net.float()", "net.half()", ADAM),
        ("net = build(options).to('cuda', dtype=tables[options.kind])", "pass", ADAM),
        ("net = AutoModelForCausalLM.from_pretrained(options.name, torch_dtype='bfloat16')", "pass", ADAM),
        ("net = AutoModelForCausalLM.from_pretrained(options.name, **keywords)", "pass", ADAM),
        (PLAIN, "wrapped = DDP(net)", "optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)"),
        (PLAIN, "groups = [{'params': net.body.parameters()}]", "optimizer = torch.optim.Adam(groups)"),
        (PLAIN, "pass", "optimizer = torch.optim.Adam(chosen_params(net), lr=1e-4)"),
        (PLAIN, "if options.use_lora: net = get_peft_model(net, options)", ADAM),
        (PLAIN, "if not options.use_lora: trained = net", ADAM.replace("net.p", "trained.p")),
    ],
)
def test_half_models_that_an_optimizer_takes_in_the_same_file(made: str, after: str, optimizer: str) -> None:
    line, cls = 17 if after.startswith("net.half") else 16, optimizer.partition("optim.")[2].partition("(")[0]
    assert read(SCRIPT.format(made=made, after=after, optimizer=optimizer)) == [(line, "net", cls)]


@pytest.mark.parametrize(
    ("made", "after", "optimizer"),
    [
        ("net = build(options)", "pass", ADAM),
        (PLAIN, "net.float()", ADAM),
        (PLAIN, "net = net.to(torch.float32)", ADAM),
        (PLAIN, "net.requires_grad_(False)", ADAM),
        (PLAIN, "for p in net.parameters(): p.data = p.data.float()", ADAM),
        (PLAIN, "net = get_peft_model(net, options)", ADAM),
        (PLAIN, "if options.grow: net = get_peft_model(net, options)", ADAM),
        ("net = build(options)", "if options.use_lora: net.to(dtype)", ADAM),
        (PLAIN, "if options.use_lora: net = get_peft_model(net, options); " + ADAM, "pass"),
        (PLAIN, "other = build(options)", "optimizer = torch.optim.Adam(other.parameters())"),
        (PLAIN, "master_params = [p.detach().clone() for p in net.parameters()]", ADAM),
        ("net = AutoModelForCausalLM.from_pretrained(options.name, dtype=dtype, load_in_8bit=True)", "pass", ADAM),
        ("net = build(options)", "shown = net.half()", ADAM.replace("net.p", "build(options).p")),
        (PLAIN, "pass", "optimizer = house.AdamWBF16(net.parameters())"),
        (PLAIN, "pass", "optimizer = house.FusedAdam(net.parameters(), master_weights=True)"),
    ],
)
def test_what_is_fp32_frozen_adapted_or_has_masters_is_not_told(made: str, after: str, optimizer: str) -> None:
    assert read(SCRIPT.format(made=made, after=after, optimizer=optimizer)) == []


def test_tests_and_functions_that_train_nothing_are_passed_over() -> None:
    text = SCRIPT.format(made=PLAIN, after="pass", optimizer=ADAM)
    assert len(read(text)) == 1
    assert read(text, "tests/test_fit.py") == []
    assert read(text.replace("def fit", "def benchmark")) == []


ACCELERATED = """
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline


def main(config, loader):
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    pipe = StableDiffusionPipeline.from_pretrained(config.name)
    dtype = {dtype}
    {cast}
    layers = wrapped_layers(pipe.unet) if config.small else pipe.unet
    if config.whole:
        layers = pipe.unet
    optimizer = chosen(config)(layers.parameters(), lr=config.lr)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=config.lr)
    for x in loader:
        loss = layers(x).mean()
        accelerator.backward(loss)
        optimizer.step()
"""
HALVED = "torch.float16 if accelerator.mixed_precision == 'fp16' else torch.float32"


@pytest.mark.parametrize(
    ("dtype", "cast", "lines"),
    [
        (HALVED, "pipe.unet.to(accelerator.device, dtype=dtype)", [11]),
        (HALVED.replace("float16", "bfloat16"), "pipe.unet.to(accelerator.device, dtype=dtype)", []),
        (HALVED, "pipe.vae.to(accelerator.device, dtype=dtype)", []),
        (HALVED, "if config.use_lora: pipe.unet.to(accelerator.device, dtype=dtype)", []),
    ],
)
def test_what_accelerate_trains_may_be_fp16_under_its_scaler(
    tmp_path: Path, dtype: str, cast: str, lines: list[int]
) -> None:
    facts = half_models.read(
        File("fit.py", Path("fit.py"), ACCELERATED.format(dtype=dtype, cast=cast).encode(), Project(Path.cwd()))
    )
    assert [each.at.line for each in facts if isinstance(each, HalfModel) and "accelerate" in each.scaled] == lines


METHODS = """
import torch

from house.engines import Engine


class Trainer(Engine):
    def load(self, path):
        self.model = torch.load(path, weights_only=False).{cast}
        self.aside = torch.load(path, weights_only=False).half()

    def equip(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def after(self):
        for task in self.registry.values():
            task.loss.backward()
            self.scaler.{step}(task.optimizer)
"""


@pytest.mark.parametrize(
    ("cast", "step", "rules"),
    [
        ("half()", "step", ["bf16-only-weights", "scaler-with-half-weights"]),
        ("half()", "get_scale", ["bf16-only-weights"]),
        ("bfloat16()", "step", ["bf16-only-weights"]),
        ("float()", "step", []),
    ],
)
def test_what_belongs_to_an_object_is_half_in_all_its_methods(
    tmp_path: Path, cast: str, step: str, rules: list[str]
) -> None:
    text = METHODS.format(cast=cast, step=step)
    for rule in ("bf16-only-weights", "scaler-with-half-weights"):
        assert told(tmp_path, text, rule) == ([(9, "possible")] if rule in rules else [])
