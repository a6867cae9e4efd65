"""What outside APIs do, read from ``rules/frameworks.toml``: a table, so that the interpreter holds no list of names."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, ClassVar

from msgspec import field
from msgspec.structs import replace

from precisionlint.catalogue import folder
from precisionlint.records import Record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USUAL = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "optim": "torch.optim", "np": "numpy"}
"""What these names stand for where a star import brings them in from a file that is not read."""


class Apis(Record, frozen=True, eq=False):
    """The table, arranged for look-ups by canonical name."""

    aside: ClassVar[tuple[str, ...]] = ("kinds",)

    aliases: dict[str, str]
    scalers: frozenset[str]
    sharded_scalers: frozenset[str]
    scaler_settings: tuple[str, ...]
    autocast: dict[str, str]
    optimizers: frozenset[str]
    adaptive: frozenset[str]
    other_optimizers: tuple[str, ...]
    clips: dict[str, tuple[int, str, int, str]]
    norms: dict[str, int]
    wrappers: frozenset[str]
    fsdp1: frozenset[str]
    fsdp2: frozenset[str]
    owners: frozenset[str]
    engines: dict[str, str]
    load_methods: frozenset[str]
    load_arguments: tuple[str, ...]
    quantised: tuple[str, ...]
    adapters: frozenset[str]
    averages: frozenset[str]
    plain_optim: frozenset[str]
    engine_arguments: tuple[str, ...]
    stars: dict[str, tuple[str, ...]]
    """Module -> the names that a star import of it brings in, as far as they are known."""
    own: dict[str, str] = field(default_factory=dict)
    """Names that the settings say of what they act as: the name of this table that does the same."""
    kinds: dict[str, str] = field(default_factory=dict)

    def known(self) -> list[str]:
        """Every class and function whose contract stands here."""
        classes = (
            self.scalers
            | self.sharded_scalers
            | self.optimizers
            | self.wrappers
            | self.owners
            | self.adapters
            | self.averages
        )
        return sorted({*classes, *self.autocast, *self.clips, *self.norms, *self.engines, *self.other_optimizers})

    def star(self, module: str) -> dict[str, str]:
        """What a star import of a module outside of the project brings in: name -> canonical name. Of one that is not known nothing."""
        return {name: self.canonical(f"{module}.{name}") for name in self.stars.get(module, ())}

    def canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def kind(self, name: str) -> str:
        """What objects of a class are: "scaler", "autocast", "optimizer", "owner", "module", or ""."""
        if name not in self.kinds:
            self.kinds[name] = self._kind(name)
        return self.kinds[name]

    def _kind(self, name: str) -> str:
        if name in self.scalers or name in self.sharded_scalers:
            return "scaler"
        if name in self.autocast:
            return "autocast"
        if name in self.optimizers or (
            name.startswith("torch.optim.") and name.count(".") == 2 and name[12:13].isupper()
        ):
            return "optimizer"
        if any(name.startswith(prefix + ".") or name == prefix for prefix in self.other_optimizers):
            return "optimizer"
        if name in self.owners or name in self.engines:
            return OF_LIGHTNING.get(self.engines.get(name, ""), "owner")
        if name.startswith(("torch.nn.", "torchvision.models.", "timm.create_model")):
            last = name.rpartition(".")[2]
            if last in ("Parameter", "Buffer", "ParameterList"):
                return ""
            if last[:1].isupper() or name.startswith(("torchvision.models.", "timm.")):
                return "module"
        return ""


OF_LIGHTNING = {"lightning module": "module", "lightning callback": ""}
"""Classes that a trainer calls, and that own nothing of it."""


@lru_cache(maxsize=8)
def table(frameworks: tuple[tuple[str, str], ...] = ()) -> Apis:
    """The table of this installation, with what the settings say of other names: (name, the name here that acts the same)."""
    if frameworks:
        shipped = table()
        own = {name: shipped.canonical(acts) for name, acts in frameworks}
        return replace(shipped, aliases={**shipped.aliases, **own}, own=own, kinds={})
    data: dict[str, Any] = tomllib.loads((folder() / "frameworks.toml").read_text("utf-8"))
    autocast = {name: device for name, device in data["autocast"].items() if name != "read-in"}
    clips = {name: tuple(value) for name, value in data["clips"].items() if name != "read-in"}
    return Apis(
        aliases=data["aliases"],
        scalers=frozenset(data["scalers"]["plain"]),
        sharded_scalers=frozenset(data["scalers"]["sharded"]),
        scaler_settings=tuple(data["scalers"]["settings"]),
        autocast=autocast,
        optimizers=frozenset(data["optimizers"]["plain"]),
        adaptive=frozenset(data["optimizers"]["adaptive"]),
        other_optimizers=tuple(data["optimizers"]["others"]),
        clips=clips,
        norms=data["norms"],
        wrappers=frozenset(data["wrappers"]["names"]),
        fsdp1=frozenset(data["wrappers"]["fsdp1"]),
        fsdp2=frozenset(data["wrappers"]["fsdp2"]),
        owners=frozenset(data["owners"]["names"]),
        engines={name: framework for name, framework in data["engines"].items() if name != "read-in"},
        load_methods=frozenset(data["loads"]["methods"]),
        load_arguments=tuple(data["loads"]["arguments"]),
        quantised=tuple(data["loads"]["quantised"]),
        adapters=frozenset(data["adapters"]["names"]),
        averages=frozenset(data["averages"]["names"]),
        plain_optim=frozenset(data["training-arguments"]["plain"]),
        engine_arguments=tuple(data["training-arguments"]["engines"]),
        stars={module: tuple(names.split()) for module, names in data["stars"].items() if module != "read-in"},
    )
