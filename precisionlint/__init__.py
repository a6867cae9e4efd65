"""Finds precision faults in mixed-precision and FP8 training code; importing it loads nothing but its version.

``precisionlint.check``, ``precisionlint.audit`` and ``precisionlint.contract`` are functions, so no modules of the package may have those names:
importing them would replace the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from precisionlint.findings import Confidence, Report, Severity
    from precisionlint.trace.window import Audit

F = TypeVar("F", bound="Callable[..., Any]")

__version__ = "0.1.0"


def check(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    select: str | Collection[str] = (),
    extend_select: str | Collection[str] = (),
    ignore: str | Collection[str] = (),
    per_file_ignores: Mapping[str, Sequence[str]] | None = None,
    severity: Mapping[str, Severity] | None = None,
    min_confidence: Confidence | None = None,
    require_reason: bool = False,
    exclude: str | Sequence[str] = (),
    extend_exclude: str | Sequence[str] = (),
    assume: Mapping[str, str] | None = None,
    device: str = "",
    torch_version: str = "",
    frameworks: Mapping[str, str] | None = None,
    config: str | None = None,
    isolated: bool = False,
    markdown: bool = False,
    jobs: int | None = 1,
    cache: bool = False,
    texts: Mapping[str, str | bytes] | None = None,
) -> Report:
    """Reads files and folders as ``precisionlint check`` does and returns what it found.

    The settings are those of ``[tool.precisionlint]`` nearest to each file, or of the file ``config``, or none (``isolated``);
    what is given here stands above them: ``select``, ``extend_select`` and ``ignore`` are or hold names of rules or families, or
    ``all``; ``assume`` limits the reading to one configuration, such as ``{"use_amp": "True"}``; ``torch_version`` is the torch
    that the programs run with, "2.6" or ">=2.4,<2.9"; ``frameworks`` says what classes of others act as. ``texts`` holds what is read
    instead of a file of that name. ``jobs`` processes read, None: as many as it pays; ``cache``: what still holds of
    earlier runs is not read again. What cannot be read is in the report's ``errors``. Raises config.ConfigError for a
    configuration that cannot be used, catalogue.UnknownNameError for the name of a rule that is not there.
    """
    import os

    from precisionlint import checking
    from precisionlint.config import Configuration

    def several(names: str | Collection[str]) -> tuple[str, ...]:
        return (names,) if isinstance(names, str) else tuple(names)

    overrides = {
        "select": several(select),
        "extend_select": several(extend_select),
        "ignore": several(ignore),
        "per_file_ignores": {pattern: tuple(names) for pattern, names in (per_file_ignores or {}).items()},
        "severity": dict(severity or {}),
        "min_confidence": min_confidence,
        "require_reason": require_reason,
        "exclude": several(exclude),
        "extend_exclude": several(extend_exclude),
        "assume": dict(assume or {}),
        "device": device,
        "torch_version": torch_version,
        "frameworks": dict(frameworks or {}),
    }
    given = {name: value for name, value in overrides.items() if value}
    held = {name: text if isinstance(text, bytes) else text.encode() for name, text in (texts or {}).items()}
    return checking.check(
        checking.Request(
            tuple(os.fspath(path) for path in ((paths,) if isinstance(paths, str | os.PathLike) else paths)),
            Configuration(given, path=config, isolated=isolated),
            texts=held,
            markdown=markdown,
            jobs=jobs,
            cache=cache,
        )
    )


def audit(
    model: Any = None, optimizer: Any = None, scaler: Any = None, *, name: str | None = None, values: bool = False
) -> Audit:
    """Records one training step: ``with precisionlint.audit(model, optimizer, scaler) as audit: train_step(batch)``,
    then ``audit.report``.

    ``model`` is a torch.nn.Module, several in a dict or a list, or None: then modules are named when they are called.
    ``optimizer`` and ``scaler`` are one or a list; those left out are met when they are used. ``values`` reads every
    result of the step, to name the first that is not finite. Needs torch (the extra ``audit``). Raises TypeError for a
    model, optimizer or scaler that is none, UnsupportedTorchError where this torch lacks what the audit builds on.
    What the step raises passes through.
    """
    from precisionlint.trace.window import Audit

    return Audit(model, optimizer, scaler, name=name, values=values)


def contract(name: str, **options: str | float) -> Callable[[F], F]:
    """Puts a contract beside the launcher of a Triton kernel: ``@precisionlint.contract("quantize_1x128", floor=1e-10)``.

    The launcher stays as it is. ``precisionlint verify MODULE`` holds every launcher of a module against what it declares,
    ``precisionlint.testing.assert_keeps_contract`` does so in a test. ``precisionlint verify --contracts`` lists the
    contracts, the form of their launchers and their options; an underscore in an option's name stands for a hyphen. A name
    that is not there is told when the launcher is verified.
    """
    from precisionlint.kernels.launchers import declare

    return declare(name, options)
