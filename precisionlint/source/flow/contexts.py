"""What a test or a ``with`` tells of what stands behind it: dtypes that were asked for, versions, autocast regions."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import structs

from precisionlint.events import Region
from precisionlint.patterns import regex
from precisionlint.source.flow.words import VERSION
from precisionlint.valueflow import UNKNOWN, Value, find

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame


REGION = regex(r"autocast|(?:^|_)amp(?:_|$)|^_?ctx$", re.I)
"""What a program calls an autocast region that is handed to it."""


def narrow(frame: Frame, test: ast.expr) -> None:
    """A test of a variable's dtype: what holds on either side of it is not followed, so nothing is known of its dtype from here on."""
    for name in frame.flow.asked(test).dtypes_of:
        if name.startswith("self."):
            held, owner = frame.expr(ast.parse(name, mode="eval").body), frame.lookup("self")
            if held.op == "buffer" and owner is not None and owner.op == "instance":
                asked = Value("buffer", held.inputs, UNKNOWN, held.at, held.name, ref="asked")
                owner.ref.attributes[name.removeprefix("self.")] = asked
                frame.names.pop(name, None)
            continue
        old = frame.lookup(name)
        if old is not None and old.op not in ("external", "module", "instance", "file"):
            frame.names[name] = Value("view", (old,), UNKNOWN, old.at, old.name)


def asks_version(frame: Frame, test: ast.expr, value: Value) -> bool:
    """Whether a test asks for a version, or for what a module has."""
    if frame.flow.asked(test).version:
        return True
    if not value.inputs and not value.name:
        return False
    return find(value, lambda v: names_version(v.name), limit=12) is not None


@lru_cache(maxsize=10_000)
def names_version(name: str) -> bool:
    """Whether a name is one for a version, or for what a module has."""
    return VERSION.search(name) is not None


def enter(frame: Frame, context: Value) -> None:
    """What a ``with`` or a decorator enters: an autocast region, or one without gradients."""
    regions = [one for one in context.inputs if one.op == "region"] if context.op == "either" else []
    if regions and all(one.ref[0] is False for one in regions):
        context = regions[0]  # off wherever it matters
    elif regions and all(one.ref[0] is not False for one in regions):
        context = Value("region", at=context.at, name=context.name, ref=(None, regions[0].ref[1]))  # on by a setting
    elif context.op in ("input", "unknown") and REGION.search(context.name):
        context = Value("region", at=context.at, name=context.name, ref=(None, Region("", "", at=context.at)))
    if context.op == "region":
        enabled, region = context.ref
        # A region that is on for sure, or off for sure; what is undecided leaves what stood.
        frame.scope = structs.replace(
            frame.scope,
            region=region if enabled else None,
            enabled=enabled,
            switched=region if enabled is None else None,
        )
    elif context.op in ("constructed", "external") and context.name.endswith(("no_grad", "inference_mode")):
        frame.scope = structs.replace(frame.scope, grad=False)
