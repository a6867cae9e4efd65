"""``precisionlint server``: a language server for editors (Language Server Protocol over standard input and output).

Tells findings of open Python files as they stand in the editor, shows a rule's page where the pointer rests on one, and offers to fix a
finding or to write a comment that silences it. Reads the project's other files from the disk. Needs pygls (the extra ``lsp``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lsprotocol import types
from msgspec import Struct, field
from pygls import uris
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from precisionlint import __version__, catalogue
from precisionlint.add_ignores import annotated
from precisionlint.checking import Request, check
from precisionlint.config import Configuration
from precisionlint.errors import InputError
from precisionlint.findings import FileError, Finding, Place, Report
from precisionlint.patterns import regex
from precisionlint.report.excerpt import Sources
from precisionlint.report.page import page

NAME = "precisionlint"
PAUSE = 0.3
"""Seconds without a key before a changed file is read."""
WORD_BEFORE, WORD_AFTER = regex(r"[a-z0-9-]*$"), regex(r"^[a-z0-9-]*")
SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "info": types.DiagnosticSeverity.Information,
}


class State(Struct):
    """What the server knows of open files: the last report of each, and which version is being read."""

    reports: dict[str, Report] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    complaint: str = ""
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "precisionlint-reader"))
    """One thread: readings are not made for running side by side."""


def serve() -> None:
    """Serves until the editor says goodbye."""
    server, _ = make()
    server.start_io()


def make() -> tuple[LanguageServer, State]:
    """The server with its features."""
    server, state = LanguageServer(NAME, __version__), State()

    async def refresh(uri: str, pause: float = 0) -> None:
        """Reads a file as it stands in the editor, unless it changes again meanwhile."""
        number = state.wanted[uri] = state.wanted.get(uri, 0) + 1
        await asyncio.sleep(pause)
        if state.wanted.get(uri) != number or not _is_python(server.workspace.get_text_document(uri)):
            return
        document = server.workspace.get_text_document(uri)
        text, version = document.source, document.version
        try:
            report = await asyncio.get_running_loop().run_in_executor(state.reader, read, _path(uri), text)
        except InputError as error:
            if str(error) != state.complaint:
                state.complaint = str(error)
                server.window_show_message(types.ShowMessageParams(types.MessageType.Error, f"{NAME}: {error}"))
            return
        state.complaint = ""
        if state.wanted.get(uri) == number:
            state.reports[uri] = report
            diagnostics = _diagnostics(document, report)
            server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, diagnostics, version))

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: types.DidOpenTextDocumentParams) -> None:
        await refresh(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: types.DidChangeTextDocumentParams) -> None:
        await refresh(params.text_document.uri, PAUSE)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: types.DidSaveTextDocumentParams) -> None:
        for uri in list(state.wanted):  # what was saved may be what another open file calls
            await refresh(uri)

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    async def watched(params: types.DidChangeWatchedFilesParams) -> None:
        for uri in list(state.wanted):
            await refresh(uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        state.wanted.pop(uri, None)
        state.reports.pop(uri, None)
        server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        document = server.workspace.get_text_document(params.text_document.uri)
        report = state.reports.get(document.uri)
        return _hover(document, report, params.position)

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix])
    )
    def actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        document = server.workspace.get_text_document(params.text_document.uri)
        return _actions(document, state.reports.get(document.uri), params.context.diagnostics)

    return server, state


def read(path: str, text: str) -> Report:
    """What is found in a file as it stands in the editor. Raises InputError."""
    held = {path: text.encode("utf-8", errors="surrogatepass")}
    return check(Request((path,), Configuration(), texts=held))


def _is_python(document: TextDocument) -> bool:
    return bool(document.language_id == "python" or document.uri.endswith(".py"))


def _path(uri: str) -> str:
    """The file of a document; a new one that has none is read as if it lay in the current folder."""
    path = uris.to_fs_path(uri) if uri.startswith("file:") else None
    return path or str(Path.cwd() / "untitled.py")


def _diagnostics(document: TextDocument, report: Report) -> list[types.Diagnostic]:
    sources = Sources(report.texts)
    found = [_diagnostic(document, finding, sources) for finding in report.findings]
    return found + [_unreadable(document, error) for error in report.errors]


def _diagnostic(document: TextDocument, finding: Finding, sources: Sources) -> types.Diagnostic:
    when = f" (when {finding.when})" if finding.when else ""
    doubt = f" [{finding.confidence}]" if finding.confidence != "certain" else ""
    related = [
        types.DiagnosticRelatedInformation(
            types.Location(uris.from_fs_path(step.place.path) or document.uri, _range(document, step.place, sources)),
            step.message,
        )
        for step in finding.trace
    ]
    return types.Diagnostic(
        range=_range(document, finding.place, sources),
        message=f"{finding.message}{when}{doubt}",
        severity=SEVERITIES[finding.severity],
        code=finding.rule,
        source=NAME,
        related_information=related,
        tags=[types.DiagnosticTag.Unnecessary] if finding.rule == "unused-ignore" else None,
    )


def _unreadable(document: TextDocument, error: FileError) -> types.Diagnostic:
    line = (error.line or 1) - 1
    span = types.Range(types.Position(line, 0), types.Position(line + 1, 0))
    return types.Diagnostic(range=span, message=error.message, severity=types.DiagnosticSeverity.Error, source=NAME)


def _range(document: TextDocument, place: Place, sources: Sources) -> types.Range:
    """A place in the units that the editor counts in."""
    lines = sources.lines(place)
    start = types.Position(place.line - 1, place.column - 1)
    end = types.Position(place.end_line - 1, place.end_column - 1)
    return document.position_codec.range_to_client_units(lines, types.Range(start, end))


def _hover(document: TextDocument, report: Report | None, position: types.Position) -> types.Hover | None:
    """The page of the rule that a finding at a position breaks, or whose name stands there."""
    rules = catalogue.load()
    sources = Sources(report.texts if report is not None else {})
    for finding in report.findings if report is not None else ():
        span = _range(document, finding.place, sources)
        if span.start <= position <= span.end and finding.rule in rules:
            return _page(finding.rule, span)
    word = document.word_at_position(position, WORD_BEFORE, WORD_AFTER)
    return _page(word, None) if word in rules else None


def _page(rule: str, span: types.Range | None) -> types.Hover:
    return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, page(catalogue.find(rule))), span)


def _actions(
    document: TextDocument, report: Report | None, diagnostics: Sequence[types.Diagnostic]
) -> list[types.CodeAction]:
    """The fix of each finding of ours that the editor asks about, and a comment that silences it."""
    if report is None:
        return []
    sources = Sources(report.texts)
    made = []
    for diagnostic in diagnostics:
        if diagnostic.source != NAME:
            continue
        for finding in report.findings:
            if finding.rule == diagnostic.code and _range(document, finding.place, sources) == diagnostic.range:
                if finding in report.replacements:
                    made.append(_fix(document, report, finding, diagnostic))
                edit = _silence(document, finding)
                if edit is not None:
                    made.append(
                        types.CodeAction(
                            title=f"Silence {finding.rule} here with a comment",
                            kind=types.CodeActionKind.QuickFix,
                            diagnostics=[diagnostic],
                            edit=types.WorkspaceEdit(changes={document.uri: [edit]}),
                        )
                    )
                break
    return made


def _fix(document: TextDocument, report: Report, finding: Finding, diagnostic: types.Diagnostic) -> types.CodeAction:
    """The action that fixes a finding; the editor makes a safe one when it is asked to fix all it can."""
    assert finding.fix is not None
    sources = Sources(report.texts)
    edits = [types.TextEdit(_range(document, each.place, sources), each.text) for each in report.replacements[finding]]
    return types.CodeAction(
        title=f"Fix {finding.rule}" + (f" (unsafe: {finding.fix.unsafe})" if finding.fix.unsafe else ""),
        kind=types.CodeActionKind.QuickFix,
        diagnostics=[diagnostic],
        is_preferred=finding.fix.safe,
        edit=types.WorkspaceEdit(changes={document.uri: edits}),
    )


def _silence(document: TextDocument, finding: Finding) -> types.TextEdit | None:
    """The edit that writes a comment; None where none can stand."""
    before = document.source
    try:
        after = annotated(finding.place.path, before.encode("utf-8"), [finding], "").decode("utf-8")
    except (SyntaxError, ValueError):
        return None
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    first = next(
        (index for index, (one, two) in enumerate(zip(old, new, strict=False)) if one != two), min(len(old), len(new))
    )
    added = len(new) - len(old)
    span = types.Range(types.Position(first, 0), types.Position(first + 1 - added, 0))
    return types.TextEdit(span, "".join(new[first : first + 1]))
