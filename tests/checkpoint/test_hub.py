"""Pushing a result: against a fake hub, and with the library's calls replaced."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from headfold import cli
from headfold.checkpoint.folder.hub import push, require_login
from headfold.errors import HeadfoldError, UsageError
from huggingface_hub import HfApi, constants
from tiny import tiny_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine that knows one token; the requests it got are listed."""
    requests: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append(f"{self.command} {self.path}")
            known = self.headers.get("Authorization") == "Bearer hf_good"
            status = 403 if self.path.startswith("/api/repos") else 200 if known else 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"name": "me", "type": "user", "auth": {}}).encode())

        do_GET = do_POST = _answer

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield requests
    server.shutdown()
    server.server_close()


def test_a_good_login_is_accepted_and_a_bad_one_named(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    require_login("me/model")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(UsageError, match="does not accept the login"):
        require_login("me/model")
    assert hub.count("GET /api/whoami-v2") == 2


@pytest.mark.parametrize("name", ["a/b/c", "-x/y", "a b", ""])
def test_names_that_no_repository_can_have(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid repository name"):
        require_login(name)


def test_no_login_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError) as problem:
        require_login("me/model")
    assert "login" in f"{problem.value.message} {problem.value.hint}"


def test_a_refused_push_says_how_to_repeat_it(hub: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    (tmp_path / "x").write_text("x")
    with pytest.raises(HeadfoldError, match="finished, but could not be pushed") as problem:
        push(tmp_path, "me/model")
    assert f"hf upload me/model {tmp_path}" in str(problem.value.hint)
    assert (tmp_path / "x").exists()
    assert "POST /api/repos/create" in hub


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


@pytest.mark.parametrize("works", [True, False])
def test_convert_pushes_the_finished_folder(
    works: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls: list[tuple[str, Any]] = []

    def upload(self: HfApi, **arguments: Any) -> str:
        assert (arguments["folder_path"] / "README.md").exists()
        calls.append(("upload", arguments["repo_id"]))
        if not works:
            raise ConnectionError("the network is gone\nand more")
        return "https://hub/commit/1"

    monkeypatch.setattr(HfApi, "whoami", lambda self: calls.append(("whoami", None)))
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **more: calls.append((name, more["private"])))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    out = tmp_path / "out"
    arguments = ("convert", str(tmp_path / "m"), "--groups", "2", "-o", str(out), "--push-to-hub", "me/x", "--private")
    assert _run(*arguments) == (0 if works else 1)
    assert calls == [("whoami", None), ("me/x", True), ("upload", "me/x")]
    assert (out / "model.safetensors").exists()
    shown = capfd.readouterr().err
    assert ("https://hub/commit/1" if works else "the network is gone") in shown
    assert "Traceback" not in shown


def test_without_a_login_nothing_is_converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: HfApi) -> None:
        raise ConnectionError("no")

    monkeypatch.setattr(HfApi, "whoami", refuse)
    tiny_model("llama", 4, 4).save_pretrained(tmp_path / "m")
    code = _run("convert", str(tmp_path / "m"), "--groups", "2", "-o", str(tmp_path / "out"), "--push-to-hub", "me/x")
    assert code == 2
    assert not (tmp_path / "out").exists()
