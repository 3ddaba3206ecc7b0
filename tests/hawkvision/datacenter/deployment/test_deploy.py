"""`hawkvision dc deploy` as an operator meets it: the real command line against a real Ray cluster of one node."""

from __future__ import annotations

import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hawkvision.client.blocking import Client
from hawkvision.core.escalation_api import StageList
from hawkvision.core.types import Tier
from hawkvision.system.child_server import running
from tests.bench.ports import free_port
from tests.hawkvision.datacenter.conftest import KEY, MARK, ROOT, image, marked_processes
from tests.hawkvision.datacenter.servers.test_service import ask
from tests.hawkvision.tasks.classes import read_reply
from tests.waiting import WAIT_LIMIT_S


@dataclass(frozen=True)
class Cluster:
    """A Ray of its own temporary directory; `environment` holds its key and the mark of its processes."""

    address: str
    port: str
    """Where Serve listens once the first application is deployed."""
    metrics: str
    """Where the node's metrics are."""
    environment: Mapping[str, str]


def deploy(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return command(environment, "deploy", "--backend", "noop", *arguments)


def command(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `hawkvision dc` with these words."""
    line = [sys.executable, "-m", "hawkvision.cli", "dc", *words]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def cluster(models: Path) -> Iterator[Cluster]:
    """`ray start --head --block`, bounded and keyed. Ray turns a loopback node address into the machine's own."""
    mark, port = uuid.uuid4().hex, free_port()
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_metrics_report_interval_ms": "1000",
        "HAWKVISION_DC_MODELS_DIR": str(models),
        "HAWKVISION_DC_TASKS": "shapes",
        "HAWKVISION_DC_NUM_CPUS": "0.25",
        "HAWKVISION_DC_API_KEY": KEY,
    }
    bounds = ["--num-cpus=16", "--object-store-memory=83886080", "--include-dashboard=false"]
    metrics = free_port()
    ports = [f"--port={port}", f"--ray-client-server-port={free_port()}", "--dashboard-agent-listen-port=0"]
    ports.append(f"--metrics-export-port={metrics}")
    # A short directory of its own: the paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="hawkvision", ignore_cleanup_errors=True) as folder:
        program = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={folder}"]
        head = subprocess.Popen(
            [*program, *bounds, *ports], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert head.stdout is not None
        try:
            said = b"".join(up_to(b"Ray runtime started", head.stdout))
            assert b"Ray runtime started" in said, said.decode()
            yield Cluster(f"127.0.0.1:{port}", str(free_port()), f"http://127.0.0.1:{metrics}", environment)
        finally:
            head.send_signal(signal.SIGTERM)
            head.communicate(timeout=60)
        until_none(mark)


def up_to(mark: bytes, lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines as far as the first one that holds `mark`, that one included; all where none does."""
    for line in lines:
        yield line
        if mark in line:
            return


def until_none(mark: str) -> None:
    ends = time.monotonic() + 60.0
    while (left := marked_processes(mark)) and time.monotonic() < ends:
        selectors.DefaultSelector().select(0.05)
    assert left == []


@pytest.mark.slow
def test_the_deployed_application_answers_an_update_replaces_it_and_the_nodes_metrics_show_it(cluster: Cluster) -> None:
    service = f"http://127.0.0.1:{cluster.port}"
    for stages in ("medium", "medium,reference"):
        done = deploy(cluster.environment, "--address", cluster.address, "--port", cluster.port, "--variants", stages)
        assert done.returncode == 0, done.stderr
        assert ask(service, path="/readyz", Authorization="").status == 200
        listed = msgspec.json.decode(ask(service, path="/v1/stages").body, type=StageList)
        answer = read_reply(ask(service, image()).body)
        assert [stage.name for stage in listed.stages] == stages.split(",")
        assert answer.model == listed.best
        assert ask(service, path="/v1/stages", Authorization="").status == 401
    the_nodes_metrics_have_the_cascades_beside_serves(cluster)
    refused = deploy(cluster.environment, "--address", cluster.address, "--port", str(free_port()))
    assert (refused.returncode, f"expected --host 127.0.0.1 --port {cluster.port}" in refused.stderr) == (1, True)
    without = deploy(
        cluster.environment, "--address", cluster.address, "--port", cluster.port, "--backend", "onnxruntime"
    )
    assert without.returncode == 1
    assert re.search(r"error: [0-9.]+ lacks models: task 'shapes': variant", without.stderr), without.stderr
    a_request_without_an_ingress_is_refused_at_once(cluster, service)


def a_request_without_an_ingress_is_refused_at_once(cluster: Cluster, service: str) -> None:
    """It does not wait for the next ingress, and that one comes."""
    mark = f"{MARK}={cluster.environment[MARK]}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            title = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if "ServeReplica:hawkvision:ingress" in title and mark in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
    statuses = [0]
    ends = time.monotonic() + WAIT_LIMIT_S
    while not (503 in statuses and statuses[-1] == 200):
        assert time.monotonic() < ends, statuses
        statuses.append(ask(service, path="/readyz").status)
        selectors.DefaultSelector().select(0.05)


def the_nodes_metrics_have_the_cascades_beside_serves(cluster: Cluster) -> None:
    """While the application runs, and has answered an image."""
    tags = 'application="hawkvision",.*deployment="ingress",.*replica="[^"]+"'
    wanted = {
        "Serve's": r"ray_serve_num_http_requests_total\{",
        "a counter": rf'ray_hawkvision_datacenter_answers_total\{{.*{tags}.*task="shapes".*\}} [1-9]',
        "a gauge": rf"ray_hawkvision_datacenter_live_replicas\{{.*{tags}.*\}} 1\.0",
        "a histogram": r'ray_hawkvision_datacenter_inference_duration_seconds_bucket\{.*le="\+Inf".*\} [1-9]',
    }
    ends = time.monotonic() + WAIT_LIMIT_S
    while True:
        page = ask(cluster.metrics, path="/metrics").body.decode()
        missing = {what for what, pattern in wanted.items() if not re.search(pattern, page)}
        if not missing:
            break
        assert time.monotonic() < ends, (missing, [line for line in page.splitlines() if "hawkvision" in line])
        selectors.DefaultSelector().select(0.1)
    assert "key_requests" not in page


OTHER = """
from ray import serve
from starlette.responses import Response

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Other:
    def __call__(self, request):
        return Response("another application")

serve.run(Other.bind(), name="other", route_prefix="/")
"""


@pytest.mark.slow
def test_two_tasks_below_a_path_beside_another_application(cluster: Cluster) -> None:
    """Serve's proxies take the requests; `tests/system/test_route_prefix.py` shows the same at our own listener."""
    settings = {"TASKS": "imagenet,cifar10", "NUM_CPUS": "0.1", "APP_NAME": "eyes", "ROUTE_PREFIX": "/vision"}
    environment = dict(cluster.environment) | {f"HAWKVISION_DC_{name}": value for name, value in settings.items()}
    del environment["HAWKVISION_DC_MODELS_DIR"]
    done = deploy(environment, "--address", cluster.address, "--port", cluster.port)
    assert done.returncode == 0, done.stderr
    removed = command(environment, "remove", "--address", cluster.address)  # which another test deployed at /
    assert removed.stdout == "removed: hawkvision\n", removed.stderr
    again = command(environment, "remove", "--address", cluster.address)
    assert "no application 'hawkvision' on this cluster; it has eyes" in again.stderr
    subprocess.run([sys.executable, "-c", OTHER], env={**environment, "RAY_ADDRESS": cluster.address}, check=True)
    service = f"http://127.0.0.1:{cluster.port}"
    assert ask(service, path="/any/path").body == b"another application"
    assert ask(service, path="/vision/readyz", Authorization="").status == 200
    for task in ("imagenet", "cifar10"):
        listed = msgspec.json.decode(ask(service, path=f"/vision/v1/stages?task={task}").body, type=StageList)
        assert listed.task == task
    words = ("--backend", "noop", "--port", "0", "--task", "cifar10", "--datacenter-url", f"{service}/vision")
    with (
        running("edge", *words, env={"HAWKVISION_EDGE_DATACENTER_API_KEY": KEY}) as node,
        Client(node.url) as client,
    ):
        ends = time.monotonic() + 60.0
        while client.classify(image(), quality="best").tier is not Tier.DATACENTER:
            assert time.monotonic() < ends, node.output()


@pytest.mark.slow
def test_a_wrong_cluster_key_is_explained_in_one_line(cluster: Cluster) -> None:
    environment = {**cluster.environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = deploy(environment, "--address", cluster.address, "--port", str(free_port()))
    assert done.returncode == 1
    assert explanation(done).startswith("error: dc.address: ")


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "somewhere", "local"])
def test_an_address_without_a_cluster_is_explained_in_one_line(models: Path, address: str) -> None:
    environment = {**os.environ, "HAWKVISION_DC_MODELS_DIR": str(models), "HAWKVISION_DC_TASKS": "shapes"}
    done = deploy(environment, "--address", address.format(port=free_port()))
    assert done.returncode == 1
    assert explanation(done).startswith("error: dc.address")


def explanation(done: subprocess.CompletedProcess[str]) -> str:
    """What the command itself said, Ray's own log lines (`[2026-…`) left out; exactly one line."""
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("[20")]
    return line
