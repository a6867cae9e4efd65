"""The language server under a client that speaks to it over standard input and output, as an editor does."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import CLIP, CLIP_CALL, CLIP_LINE, SOUND

pytest.importorskip("pygls")


class Client:
    """An editor: frames, requests and notifications, nothing else."""

    def __init__(self, folder: Path, encodings: list[str]) -> None:
        command = [sys.executable, "-m", "precisionlint", "server"]
        self.process = subprocess.Popen(command, cwd=folder, stdin=-1, stdout=-1, stderr=-1)
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.number = 0
        general = {"positionEncodings": encodings}
        self.answer = self.request(
            "initialize", processId=None, rootUri=folder.as_uri(), capabilities={"general": general}
        )
        self.notify("initialized")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        while header := self.process.stdout.readline():
            length = int(header.split(b":")[1])
            while self.process.stdout.readline().strip():
                pass
            self.told.put(json.loads(self.process.stdout.read(length)))

    def _send(self, **message: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        self.process.stdin.flush()

    def notify(self, method: str, **params: Any) -> None:
        self._send(method=method, params=params)

    def request(self, method: str, **params: Any) -> Any:
        self.number += 1
        self._send(id=self.number, method=method, params=params)
        while True:
            message = self.told.get(timeout=60)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]

    def wait(self, method: str) -> Any:
        while True:
            message = self.told.get(timeout=60)
            if message.get("method") == method:
                return message["params"]

    def open(self, path: Path, text: str) -> list[dict[str, Any]]:
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
        self.notify("textDocument/didOpen", textDocument=document)
        return self.diagnostics(path)

    def change(self, path: Path, text: str, version: int) -> None:
        document = {"uri": path.as_uri(), "version": version}
        self.notify("textDocument/didChange", textDocument=document, contentChanges=[{"text": text}])

    def diagnostics(self, path: Path) -> list[dict[str, Any]]:
        told = self.wait("textDocument/publishDiagnostics")
        assert told["uri"] == path.as_uri()
        return list(told["diagnostics"])

    def close(self) -> tuple[int, bytes]:
        self.request("shutdown")
        self.notify("exit")
        assert self.process.stderr is not None
        return self.process.wait(timeout=30), self.process.stderr.read()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path, ["utf-16"])
    yield client
    client.process.kill()
    client.process.communicate()


def position(text: str, words: str) -> dict[str, int]:
    line = next(number for number, each in enumerate(text.split("\n")) if words in each)
    return {"line": line, "character": text.split("\n")[line].index(words)}


def test_an_open_file_is_told_as_it_stands_in_the_editor(client: Client, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(SOUND)
    (found,) = client.open(path, CLIP)
    assert (found["code"], found["source"], found["severity"]) == ("clip-before-unscale", "precisionlint", 1)
    line = CLIP_LINE - 1
    assert found["range"] == {
        "start": {"line": line, "character": 8},
        "end": {"line": line, "character": 8 + len(CLIP_CALL)},
    }
    related = found["relatedInformation"]
    assert [each["location"]["range"]["start"]["line"] for each in related] == [line - 1, line - 1, line]
    assert related[0]["location"]["uri"] == path.as_uri()
    client.change(path, "import torch\n(", 2)
    client.change(path, SOUND, 3)
    assert client.diagnostics(path) == []
    client.change(path, f"{CLIP}\nx = (", 4)
    (broken,) = client.diagnostics(path)
    assert "never closed" in broken["message"]
    client.notify("textDocument/didClose", textDocument={"uri": path.as_uri()})
    assert client.diagnostics(path) == []
    assert client.close() == (0, b"")


def test_a_saved_file_refreshes_those_that_call_it(client: Client, tmp_path: Path):
    helpers, train = tmp_path / "helpers.py", tmp_path / "train.py"
    helpers.write_text(
        "from torch import nn\n\n\ndef clip(model):\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    )
    text = CLIP.replace(CLIP_CALL, "clip(model)").replace(
        "import torch\n", "import torch\nfrom helpers import clip\n", 1
    )
    (found,) = client.open(train, text)
    assert found["relatedInformation"][-1]["location"]["uri"] == helpers.as_uri()
    helpers.write_text("def clip(model):\n    pass\n")
    client.notify("textDocument/didSave", textDocument={"uri": helpers.as_uri()})
    assert client.diagnostics(train) == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8", "utf-32"])
def test_places_are_counted_as_the_editor_counts(encoding: str, tmp_path: Path):
    client = Client(tmp_path, [encoding])
    try:
        text = CLIP.replace(CLIP_CALL, f"print('𝔽é'); {CLIP_CALL}")
        (found,) = client.open(tmp_path / "train.py", text)
        line = text.split("\n")[CLIP_LINE - 1]
        before = line[: line.index(CLIP_CALL)]
        width = {"utf-8": len(before.encode()), "utf-16": len(before.encode("utf-16-le")) // 2, "utf-32": len(before)}
        assert client.answer["capabilities"]["positionEncoding"] == encoding
        assert found["range"]["start"]["character"] == width[encoding]
    finally:
        client.process.kill()
        client.process.communicate()


def test_the_page_of_a_rule_is_shown_on_a_finding_and_on_its_name(client: Client, tmp_path: Path):
    path = tmp_path / "train.py"
    text = CLIP.replace("import torch\n", "import torch  # see clip-before-unscale\n", 1)
    client.open(path, text)
    for words in (CLIP_CALL, "before-unscale"):
        where = position(text, words)
        shown = client.request("textDocument/hover", textDocument={"uri": path.as_uri()}, position=where)
        assert shown["contents"]["kind"] == "markdown"
        assert shown["contents"]["value"].startswith("# clip-before-unscale\n")
    nothing = {"line": 3, "character": 0}
    assert client.request("textDocument/hover", textDocument={"uri": path.as_uri()}, position=nothing) is None


def applied(text: str, edit: dict[str, Any]) -> str:
    lines = text.splitlines(keepends=True)
    start, end = edit["range"]["start"], edit["range"]["end"]
    assert start["character"] == end["character"] == 0
    return "".join([*lines[: start["line"]], edit["newText"], *lines[end["line"] :]])


@pytest.mark.parametrize("call", [CLIP_CALL, f'print("""\n  text\n""", {CLIP_CALL}, """\n  text\n""")'])
def test_a_finding_can_be_silenced_from_the_editor(call: str, client: Client, tmp_path: Path):
    path = tmp_path / "train.py"
    text = CLIP.replace(CLIP_CALL, call)
    found = client.open(path, text)
    foreign = {"range": found[0]["range"], "message": "m", "source": "other", "code": "clip-before-unscale"}
    actions = client.request(
        "textDocument/codeAction",
        textDocument={"uri": path.as_uri()},
        range=found[0]["range"],
        context={"diagnostics": [*found, foreign]},
    )
    assert [each["kind"] for each in actions] == ["quickfix", "quickfix"]
    assert [each["title"] for each in actions] == [
        "Fix clip-before-unscale",
        "Silence clip-before-unscale here with a comment",
    ]
    (inserted,) = actions[0]["edit"]["changes"][path.as_uri()]
    assert inserted["range"]["start"] == inserted["range"]["end"]
    assert inserted["newText"].strip() == "scaler.unscale_(optimizer)"
    action = actions[1]
    (edit,) = action["edit"]["changes"][path.as_uri()]
    silenced = applied(text, edit)
    assert silenced.count("\n") - text.count("\n") in (0, 1)
    client.change(path, silenced, 2)
    assert client.diagnostics(path) == []


def test_a_configuration_that_cannot_be_used_is_said_once(client: Client, tmp_path: Path):
    (tmp_path / "precisionlint.toml").write_text("selct = []")
    path = tmp_path / "train.py"
    document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": CLIP}
    client.notify("textDocument/didOpen", textDocument=document)
    told = client.wait("window/showMessage")
    assert "did you mean 'select'?" in told["message"]
    client.change(path, CLIP + "\n", 2)
    (tmp_path / "precisionlint.toml").write_text("")
    client.notify("workspace/didChangeWatchedFiles", changes=[])
    assert len(client.diagnostics(path)) == 1


def test_files_of_other_languages_and_documents_without_a_file(client: Client, tmp_path: Path):
    other = {"uri": (tmp_path / "a.txt").as_uri(), "languageId": "plaintext", "version": 1, "text": CLIP}
    client.notify("textDocument/didOpen", textDocument=other)
    new = {"uri": "untitled:Untitled-1", "languageId": "python", "version": 1, "text": CLIP}
    client.notify("textDocument/didOpen", textDocument=new)
    told = client.wait("textDocument/publishDiagnostics")
    assert (told["uri"], len(told["diagnostics"])) == ("untitled:Untitled-1", 1)


def test_without_pygls_the_command_says_what_it_needs(tmp_path: Path):
    script = (
        "import sys\nfrom importlib import util\nreal = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'pygls' else real(name, *rest)\n"
        "from precisionlint import cli\nsys.exit(cli.main(['server']))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (2, "precisionlint: server needs pygls: pip install 'precisionlint[lsp]'\n")
