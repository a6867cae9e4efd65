"""What a program's files show of its matrix products before it runs: on which device they are, and whether there are any that TF32 would
speed up."""

from __future__ import annotations

import ast
import re
from typing import Any

from msgspec.structs import replace

from precisionlint.checks import Hit
from precisionlint.events import Opened
from precisionlint.patterns import regex
from precisionlint.source.interpret import Interpreter
from precisionlint.source.module import ProjectModule
from precisionlint.source.parsing import walk
from precisionlint.source.project import Project
from precisionlint.source.records import Where

PRODUCTS = regex(
    r"[Ll]inear\(|Attention|Transformer|transformers|from_pretrained|[\w)\]] @ [\w(]"
    r"|(?:matmul|bmm|\bmm|addmm|einsum|tensordot|dot_product_attention)\("
)
"""What makes matrix products, or may: TF32 for them is off at first, for convolutions it is on."""
MODELS = regex(r"(?:^|[._])(?:models?|modell?ing|nets?|networks?|archs?|architectures?|backbones?)(?:$|[._])", re.I)
"""What a file of models is called."""
LAYERS = regex(r"\bnn\.(?:Module\b|Conv|Sequential|\w*Norm)|torchvision|\bModule\)")
"""What a file holds that makes its own model, or takes one that is known to be of convolutions."""
CUDA = regex(r"\.cuda\b|[\"']cuda|torch\.cuda\.")
HALF = regex(r"autocast|bfloat16|float16|[bf][pf]?16\b|\.half\(|\bamp\b|deepspeed|[Aa]ccelerat|lightning")
BENCHMARK = regex(r"(?:^|\.)cudnn\.benchmark$")


def opened(module: ProjectModule, text: str, complete: bool) -> Opened:
    """What is known of a program before it runs."""
    device = module.project.device or ("cuda" if CUDA.search(text) else "")
    node = (tuned(module) or torch_import(module)) if device == "cuda" else None
    at = Where(module, node, ()) if node is not None else None
    return Opened(at, (), complete, "cuda" if node is not None else "")


def tuned(module: ProjectModule) -> Any:
    """The first statement that sets cuDNN's benchmark: where a program says how its GPU is to compute."""
    if "cudnn.benchmark" not in module.text:
        return None
    sets = (
        node
        for node in walk(module.tree)
        if isinstance(node, ast.Assign) and any(BENCHMARK.search(ast.unparse(target)) for target in node.targets)
    )
    return min(sets, key=lambda node: node.lineno, default=None)


def torch_import(module: ProjectModule) -> Any:
    """The node of the first import of torch."""
    for statement in module.tree.body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            names = [statement.module or ""]
        else:
            continue
        if any(name.partition(".")[0] == "torch" for name in names):
            return statement
    return None


def without_tf32(it: Interpreter, hits: list[Hit]) -> list[Hit]:
    """The hits of products outside TF32 that stand: some are made, as far as the files show. A model that none of them holds may make some."""
    module, project = it.entry, it.project
    if project.sets_matmul_precision(module.path):
        return []
    half = HALF.search(module.text) is not None  # it may reach what the paths do not show
    if any(PRODUCTS.search(each.text) for each in it.global_frames):
        return [hit for hit in hits if not (half and hit.confidence == "possible")]
    if half or not model_elsewhere(project, module):
        return []
    return [replace(hit, confidence="possible") for hit in hits]


def model_elsewhere(project: Project, module: ProjectModule) -> bool:
    """Whether a file imports its model from one that is not there, or from a library of models of all kinds, or is handed it: no layer
    stands in the file."""
    if not LAYERS.search(module.text):
        return True
    for node in walk(module.tree):
        names = [(each.name, 0) for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [(node.module or node.names[0].name, node.level)]
        for name, level in names:
            top = name.partition(".")[0]
            if top == "timm" or (
                MODELS.search(name)
                and not top.startswith(("torch", "keras", "tensorflow", "sklearn"))
                and project.find(name, level, module) is None
            ):
                return True
    return False
