from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.build import fetch, weight_bytes
from hawkvision.models.manifest import NpmSource
from hawkvision.system.files import sha256_of
from tests.hawkvision.model_zoo.tfjs.tfjs_files import package

RUNS = {"scripts": dict.fromkeys(("preinstall", "install", "prepack", "prepare", "postpack"), "touch ran")}
ARCHIVE = package({"package.json": json.dumps({"name": "@me/weights", "version": "1.0.0", **RUNS}).encode()}, "package")


class Registry(BaseHTTPRequestHandler):
    """An npm registry with one package."""

    def do_GET(self) -> None:
        archive = self.path.endswith(".tgz")
        known = self.path.startswith(("/@me%2fweights", "/@me/weights"))
        body = ARCHIVE if archive else json.dumps(self.document()).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def document(self) -> dict[str, object]:
        host = self.headers["Host"]
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(ARCHIVE).digest()).decode()
        dist = {"tarball": f"http://{host}/@me/weights/-/weights-1.0.0.tgz", "integrity": integrity}
        version = {"name": "@me/weights", "version": "1.0.0", "dist": dist, **RUNS}
        return {"name": "@me/weights", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def source(name: str = "@me/weights", sha256: str = "") -> NpmSource:
    return NpmSource(
        npm=name, version="1.0.0", member="package/model.json", archive_sha256=sha256 or sha256_of(ARCHIVE)
    )


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.usefixtures("registry")
def test_npm_package_is_downloaded_and_checked_and_none_of_its_code_runs(tmp_path: Path) -> None:
    archive = fetch(source(), tmp_path / "new")
    assert weight_bytes(source(), archive) == ARCHIVE
    assert [path.name for path in archive.parent.iterdir()] == ["me-weights-1.0.0.tgz"]
    assert fetch(source(), tmp_path / "unused", archive.parent) == archive
    with pytest.raises(ArtifactError, match="expected SHA-256 0000"):
        weight_bytes(source(sha256="0" * 64), archive)
    with pytest.raises(ArtifactError, match=r"other@1\.0\.0: npm could not download it; .*`npm pack other@1\.0\.0`"):
        fetch(source("other"), tmp_path / "other")


def test_machine_without_npm_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"there is no `npm` on this machine.*run `npm pack @me/weights@1\.0\.0`"):
        fetch(source(), tmp_path / "new")
