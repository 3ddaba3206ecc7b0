"""A node's start where the surroundings are unusual, and its end while it is starting."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hawkvision.core.errors import ArtifactError
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import cache_dir, load_manifest, models_dir
from hawkvision.native import library
from hawkvision.system.child_server import running
from tests.bench.ports import free_port
from tests.edge.conftest import Caller
from tests.images import encoded
from tests.waiting import until

pytestmark = pytest.mark.slow

NOBODY = ["unshare", "--user", "--map-user=12345", "--map-group=0", "env", "-u", "HOME", "-u", "XDG_CACHE_HOME"]


@pytest.fixture(scope="module", autouse=True)
def cascade() -> None:
    manifest = load_manifest("imagenet", models_dir())
    try:
        for variant in manifest.members(manifest.cascade.default_edge):
            load_variant(cache_dir(), manifest.task, variant)
    except ArtifactError as error:
        pytest.skip(f"the cascade is not built: {error}")


def started(*words: str, **environment: str) -> subprocess.Popen[str]:
    """A node that loads real models, as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "edge", "--cache-dir", str(cache_dir()), *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.parametrize("backend", ["auto", "onnxruntime"])
def test_sigterm_while_models_load_ends_a_node_well_and_without_a_traceback(backend: str) -> None:
    port = free_port()
    with started("--port", str(port), "--backend", backend) as node:
        asyncio.run(until(lambda: answers(port)))
        node.send_signal(signal.SIGTERM)
        said = node.stdout.read() if node.stdout else ""
    assert node.returncode == 0, said
    assert "Traceback" not in said


def slow_compiler(folder: Path) -> Mapping[str, str]:
    """A path on which a compiler says that it has begun, and never ends."""
    folder.mkdir()
    begin = f"sleep 600 & echo $! > {folder}/new; mv {folder}/new {folder}/begun; wait"
    (folder / "c++").write_text(f'#!/bin/sh\ncase "$*" in *--version*) exit;; esac\n{begin}\n')
    (folder / "c++").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.skipif(
    library.unsupported_reason() is not None, reason=f"this machine cannot: {library.unsupported_reason()}"
)
def test_sigterm_while_the_kernel_is_compiled_ends_node_and_compiler(tmp_path: Path) -> None:
    if library.packaged() is not None:
        pytest.skip("this installation brings its kernel")
    begun = tmp_path / "bin" / "begun"
    with started("--port", "0", XDG_CACHE_HOME=str(tmp_path), **slow_compiler(tmp_path / "bin")) as node:
        asyncio.run(until(begun.exists))
        node.send_signal(signal.SIGTERM)
        said = node.stdout.read() if node.stdout else ""
    assert node.returncode == 0, said
    assert "Traceback" not in said
    compiler = Path("/proc") / begun.read_text().strip()
    asyncio.run(until(lambda: not compiler.exists() or "(zombie)" in (compiler / "status").read_text()))


def test_a_node_starts_for_a_user_without_home_or_entry_in_passwd() -> None:
    if subprocess.run([*NOBODY, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody have a namespace of users")
    with running("edge", "--port", "0", "--cache-dir", str(cache_dir()), prefix=NOBODY) as node:
        assert answers(node.port)
    assert "Traceback" not in node.output()


def test_without_home_and_cache_the_error_says_what_to_set() -> None:
    done = subprocess.run(
        [*NOBODY, sys.executable, "-m", "edge", "--port", "0"], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr:
        pytest.skip("this machine lets nobody have a namespace of users")
    assert done.returncode == 1
    assert "has no HOME and no entry in /etc/passwd; set XDG_CACHE_HOME, or for models give --cache-dir" in done.stderr
    assert "Traceback" not in done.stderr


def waits_at(module: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """A module that waits when it is imported, as on a slow disk: what it makes when it begins, and the environment."""
    reached = folder / "reached"
    (folder / f"{module}.py").write_text(
        f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(60)\n", encoding="utf-8"
    )
    return reached, {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_told_to_stop_while_it_imports_ends_well(tmp_path: Path, sent: signal.Signals) -> None:
    reached, environment = waits_at("uvicorn", tmp_path)
    with started("--port", "0", **environment) as node:
        asyncio.run(until(reached.exists))
        node.send_signal(sent)
        said = node.stdout.read() if node.stdout else ""
    assert (node.returncode, said) == (0, "")


@pytest.mark.parametrize(("server", "imported"), [("edge", "uvicorn"), ("hawkvision.datacenter", "msgspec")])
def test_a_server_that_is_told_to_read_its_files_again_while_it_imports_goes_on(
    server: str, imported: str, tmp_path: Path
) -> None:
    reached, environment = waits_at(imported, tmp_path)
    command = [sys.executable, "-m", server, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        try:
            asyncio.run(until(reached.exists))
            process.send_signal(signal.SIGHUP)
            process.send_signal(0)
            status = Path(f"/proc/{process.pid}/status")
            # The kernel delivers signals before a process runs on; one that ends the process would have done so.
            asyncio.run(until(lambda: "SigPnd:\t0000000000000000" in status.read_text()))
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(("backend", "valid"), [("onnxruntime", "1.0"), ("noop", "0.0")])
def test_nothing_is_certified_by_a_backend_that_no_certificate_is_about(
    backend: str, valid: str, cascade: None
) -> None:
    with running("edge", "--port", "0", "--cache-dir", str(cache_dir()), "--backend", backend) as node:
        caller = Caller(node)
        listed = caller.get("/v1/targets").json["targets"]
        answers = [caller.classify(encoded(), f"max_accuracy_drop={drop}").json for drop in (0.02, 0.04, 0.1)]
        counted = caller.get("/metrics").body.decode()
        caller.close()
    assert f'hawkvision_certificates_valid{{task="imagenet"}} {valid}' in counted
    if backend == "noop":
        assert "certified" not in {each["status"] for each in (each["accuracy"] for each in (*listed, *answers))}
