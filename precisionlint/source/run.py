"""One run of the checker over many files: what they share (projects, rules), and findings with their places.

Each file is a program of its own; where a proof ends in another file, the finding stands at the call in this one, unless that
other file shows it by itself.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint import catalogue, documents
from precisionlint.checks import Hit, Judge, all_rules
from precisionlint.findings import Edit, FileError, Finding, Fix, GaveUp, Place, Spot, Step, best
from precisionlint.patterns import regex
from precisionlint.source.callers import NOTHING, Callers, Shown, shown
from precisionlint.source.flow import callers as flow_callers
from precisionlint.source.flow.evidence import Evidence
from precisionlint.source.flow.words import TEST_PATH
from precisionlint.source.module import ProjectModule
from precisionlint.source.parsing import UnreadableError, walk
from precisionlint.source.project import Project
from precisionlint.source.reading import Reading, read
from precisionlint.source.records import Where
from precisionlint.source.root import find_root
from precisionlint.source.values import Const, Value, const
from precisionlint.subjects import SUBJECTS, File, Subject
from precisionlint.valueflow import Defined, Shows

if TYPE_CHECKING:
    from precisionlint.reader import Totals

CONFIGURATION = regex(
    r"(?:not )?[\w.\[\]'\"]+(?:\.get\(['\"][\w.-]+['\"]\))?(?: (?:==|!=|is|is not|in|not in|<|<=|>|>=) "
    r"(?:[\w.'\"\[\]-]+|[\[({][\w.'\"\[\], -]*[\])}]))?$"
)
"""A branch that a reader would call a configuration: a name, or a name held against a name or constant."""
PASSING = regex(
    r"__name__|\b(?:global_|cur_|train_)?(?:steps?|epochs?|i|j|k|n|p|idx|index|it|iters?|iteration|i_iter|batch_idx|batch|grad|ndim|name|param)\b"
    r"|(?i:(?:\b|_)rank\b)"
)
"""What changes while a program runs is none."""
OF_PRECISION = regex(r"(?i)amp(?![a-z])|16|half|dtype|precision|mixed|scal|clip")
"""Words of a branch that asks how a program computes."""
FLOW = "precisionlint.source.flow"
CONSTANTS = {"true": True, "false": False, "none": None}


def assumed(text: str) -> Const:
    """The value of ``--assume NAME=VALUE``: True, False, None, a number, or else a string."""
    if text.lower() in CONSTANTS:
        return const(CONSTANTS[text.lower()])
    for kind in (int, float):
        try:
            return const(kind(text))
        except ValueError:
            continue
    return const(text.strip("\"'"))


class Run:
    """The state of one run."""

    def __init__(
        self,
        select: frozenset[str],
        assume: dict[str, str],
        device: str = "",
        frameworks: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.rules = catalogue.load()
        self.judge = Judge(check for name, check in all_rules().items() if name in select)
        self.assume: dict[str, Value] = {name: assumed(text) for name, text in assume.items()}
        self.device = device
        self.frameworks = frameworks
        self.projects: dict[Path, Project] = {}
        self.roots: dict[Path, Path] = {}
        self.evidence: dict[Path, Evidence] = {}
        self.alone: dict[Path, Shown | None] = {}
        self.flowing: dict[Path, flow_callers.Callers] = {}
        self.possible = True
        """Whether what is only possible is looked for."""
        self.definitions: dict[Path, frozenset[tuple[str, int]]] = {}

    def project(self, path: Path) -> Project:
        folder = path.parent
        if folder not in self.roots:
            self.roots[folder] = find_root(path)
        root = self.roots[folder]
        if root not in self.projects:
            self.projects[root] = Project(root, self.device, self.frameworks)
        return self.projects[root]

    def file(self, display: str, path: Path, data: bytes, errors: list[FileError], total: Totals) -> list[Finding]:
        """The findings of one file."""
        path = Path(os.path.abspath(path))
        project = self.project(path)
        project.given = {path: data}
        module = project.load(path, data)
        if module is None:
            error = project.errors.get(path)
            errors.append(
                FileError(display, error.line if error else None, error.message if error else "cannot be read")
            )
            return []
        places = Places(module, display)
        try:
            reading = read(project, module, self.judge, self.assume)
            findings = self.findings(reading, places, project)
        except (RecursionError, MemoryError):
            errors.append(FileError(display, None, "nested too deeply to be read"))
            return []
        except Exception as error:  # a fault of ours must not cost the other files their findings
            errors.append(internal_error(display, error))
            return []
        self.count(total, reading, module, places)
        project.forget_large()
        return findings

    def facts(
        self, display: str, path: Path, data: bytes, subjects: Iterable[Subject], errors: list[FileError]
    ) -> list[Finding]:
        """The findings of one file in what is read beside its training programs."""
        project = self.project(Path(os.path.abspath(path)))
        file = File(display, path, data, project)
        project.given = {file.path: data}
        hits: list[tuple[Hit, bool]] = []
        for subject in subjects:
            told: list[Hit] = []
            try:
                states = self.judge.start
                for fact in subject.read(file):
                    states = self.judge.advance(states, fact, told.append)
            except UnreadableError as error:
                failure = FileError(file.display, error.line, error.message)
            except (RecursionError, MemoryError):
                failure = FileError(file.display, None, "nested too deeply to be read")
            except Exception as error:  # a fault of ours must not cost the other files their findings
                failure = internal_error(file.display, error)
            else:
                continue
            finally:
                hits.extend((hit, subject.module == FLOW) for hit in told)
            if failure not in errors:
                errors.append(failure)
        found = [finding for hit, flows in hits if (finding := self.shown(hit, file, flows=flows)) is not None]
        project.forget_large()
        return best(found)

    def shown(self, hit: Hit, file: File, *, flows: bool) -> Finding | None:
        """A hit as a finding, if it stands in this file and the project shows what it needs. ``flows``: it is one of value flow."""
        # What was made in another file and proves a fault here stands at the op of this one that completes it.
        stations = (place_of(at) for at in (hit.at, *[seen.at for seen in reversed(hit.trace)]))
        place = next((place for place in stations if place is not None and place.path == file.display), None)
        if place is None:
            return None
        seen = ((place_of(one.at), one.text) for one in hit.trace)
        steps = [Step(relative(where, file.display), text) for where, text in seen if where is not None]
        if documents.kind(file.display) == "other" and TEST_PATH.search(inside(file.path, file.project.root)):
            hit = replace(hit, confidence="possible")  # a configuration that a test runs, to see that it does
        if hit.confidence == "possible" and not self.possible:
            return None  # and nothing of the project is asked
        branches = self.branches(file, [place, *(step.place for step in steps)])
        if branches is None:
            return None
        if hit.needs:
            file.project.weighed.add(file.path)
        evidence = self.evidence.setdefault(file.project.root, Evidence(file.project))
        for need in hit.needs:
            assert isinstance(need, Shows)
            where = evidence.shows(need, file.path, file.display)
            if where is None and self.possible and need.bare and hit.confidence != "certain":
                where = evidence.at_times_bare(need, file.path, file.display)
                hit = hit if where is None else replace(hit, confidence="possible")
            if where is None:
                if hit.confidence == "certain" or not self.possible:
                    return None
                own = evidence.trains and not evidence.is_cut_off(file.path)
                if own and not evidence.outside.run(file.path):
                    return None
                hit = replace(hit, confidence="possible")  # a library's callers decide, or files that are not there
            elif need.what != "training":
                handled = evidence.handled(where, file.path, file.display)
                if not handled and evidence.unused.at(file, place, where):
                    if not self.possible:
                        return None
                    hit = replace(hit, confidence="possible")
                    continue
                said = (
                    "a file of a library that handles dtypes: its callers may come with half"
                    if handled
                    else f"a program of this file shows {need.what}"
                )
                steps.insert(0, Step(relative(where, file.display), said))
        if flows and hit.confidence != "possible" and self.flow_callers(file.project).rule_out(hit.rule, place, file):
            return None
        return self.stated(hit, place, tuple(steps), fix_of(hit, place.path, place_of), branches)

    def branches(self, file: File, places: list[Place]) -> tuple[str, ...] | None:
        """What the places of a hit in its own file hang on, in words; None where one of them is never reached."""
        if documents.kind(file.display) == "other":
            return ()
        from precisionlint.subjects.branches import way

        assumed = {name: meant.value for name, meant in self.assume.items() if isinstance(meant, Const)}
        ways = [way(file, place, assumed) for place in dict.fromkeys(places) if place.path == file.display]
        return None if any(each.closed for each in ways) else tuple(word for each in ways for word in each.when)

    def flow_callers(self, project: Project) -> flow_callers.Callers:
        if project.root not in self.flowing:
            evidence = self.evidence.setdefault(project.root, Evidence(project))
            self.flowing[project.root] = flow_callers.Callers(project, evidence.importing, self.judge)
        return self.flowing[project.root]

    def findings(self, reading: Reading, places: Places, project: Project) -> list[Finding]:
        found: list[Finding] = []
        once: dict[tuple[str, Hashable], list[tuple[bool, Place]]] = {}
        for hit in reading.hits:
            if not isinstance(hit.at, Where):
                continue
            place = places.primary(hit.at)
            if place is None:
                continue
            if hit.confidence == "possible" and not self.possible:
                continue  # and no other file is asked
            if self.shown_elsewhere(project, hit, places.module) or self.ruled_out(project, hit, places.module):
                continue
            if of_test(hit, places.module) or self.callers(project).unscale(hit, places.module):
                hit = replace(hit, confidence="possible")
            found.append(self.finding(hit, place, places))
            if hit.once is not None:
                once.setdefault((hit.rule, hit.once), []).append((hit.at.module is not places.module, place))
        return told_once(best(found), once)

    def ruled_out(self, project: Project, hit: Hit, module: ProjectModule) -> bool:
        """Whether the callers of a file's function hand it nothing for which the hit stands."""
        return self.callers(project).rule_out(hit, module)

    def callers(self, project: Project) -> Callers:
        evidence = self.evidence.setdefault(project.root, Evidence(project))
        return Callers(project, lambda path: evidence.importers.get(path, []), lambda path: self.shows(project, path))

    def shows(self, project: Project, path: Path) -> Shown | None:
        """What a file shows when it is read by itself; None where it cannot be."""
        if path not in self.alone:
            self.alone[path] = NOTHING  # files that call each other: the first one asked for keeps it
            module = project.load(path)
            self.alone[path] = shown(read(project, module, self.judge, self.assume)) if module is not None else None
        return self.alone[path]

    def shown_elsewhere(self, project: Project, hit: Hit, here: ProjectModule) -> bool:
        """Whether another file on the way shows the fault without this one: the file in which it ends, or one that calls into that."""
        for module in dict.fromkeys([hit.at.module, *(module for module, _ in hit.at.stack)]):
            if module is not here:
                place = Places(module, "").primary(hit.at)
                if place is None:
                    continue
                alone = self.shows(project, module.path)
                if alone is not None and (hit.rule, module.path, place.line) in alone.faults:
                    return True
                spot = (hit.rule, place.line)
                if hit.rule in self.at_definitions and spot in self.defined_in(project, module, here):
                    return True
        return False

    @cached_property
    def at_definitions(self) -> frozenset[str]:
        """The rules that are told where something is defined as well, with the project's evidence."""
        return frozenset(rule for rule, check in all_rules().items() if Defined in check.events)

    def defined_in(self, project: Project, module: ProjectModule, here: ProjectModule) -> frozenset[tuple[str, int]]:
        """What a file shows of its own definitions: rules and lines."""
        project.weighed.add(here.path)
        if module.path not in self.definitions:
            display, data = module.path.as_posix(), project.read(module.path) or b""
            subjects = [subject for subject in SUBJECTS if subject.wants(display, data)]
            found = self.facts(display, module.path, data, subjects, [])
            self.definitions[module.path] = frozenset(
                (one.rule, one.place.line) for one in found if one.confidence != "possible"
            )
        return self.definitions[module.path]

    def finding(self, hit: Hit, place: Place, places: Places) -> Finding:
        steps = [Step(places.of(s.at.module, s.at.node), s.text) for s in hit.trace if isinstance(s.at, Where)]

        def placed(at: Any) -> Place | None:
            return places.of(at.module, at.node) if isinstance(at, Where) else None

        return self.stated(hit, place, tuple(steps), fix_of(hit, place.path, placed))

    def stated(
        self, hit: Hit, place: Place, trace: tuple[Step, ...], fix: Fix | None, branches: tuple[str, ...] = ()
    ) -> Finding:
        """A hit as a finding; ``branches``: what its places hang on beside what its trace tells."""
        rule = self.rules[hit.rule]
        return Finding(
            rule=hit.rule,
            family=rule.family,
            severity="info" if hit.confidence == "possible" else hit.severity or rule.severity,
            confidence=hit.confidence,
            message=hit.message,
            place=place,
            when=" and ".join(telling(conditions(hit, branches))),
            trace=trace,
            fix=None if hit.confidence == "possible" else fix,
            torch=hit.torch,
            decided=hit.decided,
        )

    def count(self, total: Totals, reading: Reading, module: ProjectModule, places: Places) -> None:
        coverage = reading.coverage
        total.read += 1
        total.programs += coverage.programs
        total.loops += spots(coverage.loops, places)
        total.optimizers += spots(coverage.optimizers, places)
        total.scalers += spots(coverage.scalers, places)
        total.assumed += tuple(sorted(coverage.assumed))
        if recipe := coverage.recipe.text():
            total.recipes += (recipe,)
        for (where, node), what in coverage.gave_up.items():
            place = places.of(where, getattr(node, "node", node))
            total.gave_up += (GaveUp(place.path, place.line, what),)


def spots(found: dict[Any, Where], places: Places) -> tuple[Spot, ...]:
    """Where things stand that reading came across."""
    at = (places.of(each.module, getattr(each.node, "node", each.node)) for each in found.values())
    return tuple(Spot(place.path, place.line, place.column) for place in at)


def of_test(hit: Hit, module: ProjectModule) -> bool:
    """Whether a hit is about what a test trains: it is made to be compared or to run at all, and how well it learns is no matter."""
    if TEST_PATH.search(inside(module.path, module.project.root)):
        return True
    if "def test_" not in module.text:
        return False
    places = [at for at in (hit.at, *(seen.at for seen in hit.trace)) if isinstance(at, Where)]
    lines = {node.lineno for at in places for where, node in ((at.module, at.node), *at.stack) if where is module}
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and any(node.lineno <= line <= (node.end_lineno or line) for line in lines)
        for node in walk(module.tree)
    )


def inside(path: Path, root: Path) -> str:
    """A file's path in its project."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def place_of(at: Any) -> Place | None:
    return at if isinstance(at, Place) else getattr(at, "place", None)


def fix_of(hit: Hit, path: str, placed: Callable[[Any], Place | None]) -> Fix | None:
    """The fix of a hit, if all that it changes stands in the file of a name."""
    if hit.fix is None:
        return None
    edits = []
    for change in hit.fix.changes:
        place = placed(change.at)
        if place is None or place.path != path:
            return None
        edits.append(Edit(change.kind, place, change.name, change.text))
    return Fix(tuple(edits), hit.fix.unsafe, hit.fix.torch)


def relative(place: Place, display: str) -> Place:
    """A place of the project as the user would name it."""
    if os.path.isabs(display) or place.path == display:
        return place
    return replace(place, path=Path(os.path.relpath(place.path)).as_posix())


def internal_error(display: str, error: Exception) -> FileError:
    return FileError(display, None, f"internal error, please report it: {type(error).__name__}: {error}")


def conditions(hit: Hit, branches: tuple[str, ...] = ()) -> list[str]:
    """The branches that the way to a finding takes, in words; those that it takes both ways say nothing."""
    words = (*branches, *(label for seen in hit.trace for label in seen.when))
    labels = dict.fromkeys(label for label in words if CONFIGURATION.match(label))
    labels = {label: None for label in labels if not PASSING.search(label)}
    taken = set(labels)
    equal = {label.partition(" == ")[0] for label in labels if " == " in label}
    return [
        label
        for label in labels
        if opposite(label) not in taken and not (" != " in label and label.partition(" != ")[0] in equal)
    ]


def telling(labels: list[str], most: int = 3) -> list[str]:
    """The few of many branches that tell a reader when a fault stands: those that ask about precision first, then the nearest."""
    ranked = sorted(range(len(labels)), key=lambda index: (not OF_PRECISION.search(labels[index]), -index))
    return [labels[index] for index in sorted(ranked[:most])]


def opposite(label: str) -> str:
    """The other branch of a test, in words: of ``x is None`` and ``x in y`` it is told by the operator."""
    for operator, other in ((" is not ", " is "), (" is ", " is not "), (" not in ", " in "), (" in ", " not in ")):
        if operator in label:
            return label.replace(operator, other, 1)
    return label[4:] if label.startswith("not ") else f"not {label}"


def told_once(findings: list[Finding], shown: dict[tuple[str, Hashable], list[tuple[bool, Place]]]) -> list[Finding]:
    """The findings, those that show one fault of one object (see ``Hit.once``) as the first of them, which names the other places. ``shown``:
    these, each with whether it is but a call of what another file does: what the file does itself comes first."""
    also: dict[tuple[str, Place], list[Place]] = {}
    later: set[tuple[str, Place]] = set()
    for (rule, _), places in shown.items():
        first, *others = (place for _, place in sorted(set(places)))
        also.setdefault((rule, first), []).extend(others)
        later.update((rule, place) for place in others)
    told = []
    for finding in findings:
        key = (finding.rule, finding.place)
        if key in also:
            others = sorted({place for place in also[key] if (finding.rule, place) not in also})
            told_of = {step.place for step in finding.trace}
            steps = tuple(Step(place, "and here") for place in others if place not in told_of)
            told.append(replace(finding, trace=finding.trace + steps))
        elif key not in later:
            told.append(finding)
    return told


class Places:
    """Nodes as places, seen from the file that was asked for."""

    def __init__(self, module: ProjectModule, display: str) -> None:
        self.module = module
        self.display = display

    def primary(self, where: Where) -> Place | None:
        """Where a finding stands in this file: its own place, or the call in this file that led there; None if there is neither."""
        if where.module is self.module:
            return self.of(where.module, where.node)
        for module, node in reversed(where.stack):
            if module is self.module:
                return self.of(module, node)
        return None

    def path_of(self, module: ProjectModule) -> str:
        if module is self.module:
            return self.display
        if os.path.isabs(self.display):
            return module.path.as_posix()
        return Path(os.path.relpath(module.path)).as_posix()

    def of(self, module: ProjectModule, node: Any) -> Place:
        return Place(self.path_of(module), *(module.span(node) or (1, 1, 1, 1)))
