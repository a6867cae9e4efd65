"""Shell scripts that launch training: Megatron's arguments, overrides of a configuration (``trainer.reduce_dtype=bf16``), and DeepSpeed's
configuration where the script writes it itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.recipes import Recipe, Setting
from precisionlint.source.parsing import UnreadableError
from precisionlint.subjects import File, deepspeed, megatron
from precisionlint.subjects.tree import tables
from precisionlint.subjects.yaml_trees import documents

OVERRIDE = regex(r"(?<![\w$-])[+]*((?:\w+\.)+(reduce_dtype|main_grads_dtype))=[\"']?(\w+)")
FILLED = regex(r"\$\{[^}\n]*\}")
"""``${NAME:-default}``: not JSON before the shell has read it; it becomes a plain ``$NAME`` of the same length."""
HERE = regex(r"<<-?[ \t]*([\"']?)(\w+)\1")


def read(file: File) -> Iterator[Recipe]:
    """The recipes of a script, in no order."""
    yield from megatron.read(file)
    for number, line in enumerate(file.lines, 1):
        for match in OVERRIDE.finditer(megatron.COMMENT.sub("", line)):
            at = Place(file.display, number, match.start(1) + 1, number, match.end() + 1)
            setting = Setting(match[1], match[3], at)
            if setting.half and match[2] == "reduce_dtype":
                yield Recipe(at=at, when=(), framework="FSDP", reduces=setting)
            elif setting.half:
                yield Recipe(at=at, when=(), framework="Megatron", accumulates=setting)
    for first, text in _written(file):
        try:
            found = documents(File(file.display, file.path, ("\n" * first + text).encode(), file.project), is_json=True)
        except UnreadableError:
            continue  # no JSON
        for document in found:
            yield from (recipe for table in tables(document) if (recipe := deepspeed.recipe(table)) is not None)


def _written(file: File) -> Iterator[tuple[int, str]]:
    """The texts of the script's here-documents that look like JSON, each with the number of lines before it."""
    lines = file.lines
    for number, line in enumerate(lines, 1):
        match = HERE.search(line)
        if match is None:
            continue
        ends = (end for end in range(number, len(lines)) if lines[end].strip() == match[2])
        body = lines[number : next(ends, number)]
        if body and body[0].lstrip().startswith("{"):
            yield number, FILLED.sub(lambda filled: "$".ljust(len(filled[0]), "_"), "\n".join(body))
