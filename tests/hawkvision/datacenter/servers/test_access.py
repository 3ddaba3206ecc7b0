"""A real tier behind TLS with several keys and client certificates, and edge nodes that escalate to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hawkvision.servers.keyfile import Scope, add_key, remove_key
from hawkvision.system.child_server import running
from tests.authority import Authority, Pair
from tests.edge.conftest import Caller, Reply
from tests.hawkvision.datacenter.conftest import image, launch, ready_url, stop
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Guarded:
    """The tier, and what its callers need."""

    launcher: int
    """The process id that an operator knows."""
    url: str
    authority: Authority
    pair: Pair
    own: Pair
    """A caller's certificate."""
    keys_file: Path
    edge: str
    """A key that may infer."""
    prometheus: str
    """A key that may observe."""

    def connection(self, own: Pair | None) -> http.client.HTTPSConnection:
        netloc = urlsplit(self.url).netloc
        return http.client.HTTPSConnection(netloc, timeout=30, context=self.authority.client(own))

    def ask(self, path: str, key: str | None, body: bytes | None = None) -> Reply:
        with closing(self.connection(self.own)) as connection:
            return send(connection, path, key, body)


def send(connection: http.client.HTTPConnection, path: str, key: str | None, body: bytes | None = None) -> Reply:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@pytest.fixture(scope="module")
def tier(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    authority, keys_file = Authority(folder), folder / "keys.toml"
    pair, own = authority.certify("tier"), authority.certify("edge")
    edge = add_key(keys_file, "edge", [Scope.INFER])
    prometheus = add_key(keys_file, "prometheus", [Scope.OBSERVE])
    files = {
        "tls_certificate": str(pair.certificate),
        "tls_key": str(pair.key),
        "tls_client_ca": str(authority.path),
        "keys_file": str(keys_file),
    }
    running = launch(models, log=None, **files)
    url = ready_url(running.process)
    yield Guarded(running.process.pid, url, authority, pair, own, keys_file, edge, prometheus)
    stop(running)


def test_the_tier_answers_over_tls(tier: Guarded) -> None:
    assert tier.url.startswith("https://")
    reply = tier.ask("/v1/infer", tier.edge, image())
    assert (reply.status, reply.json["model"]) == (200, "reference")


def test_a_caller_without_a_certificate_hears_why_it_is_refused(tier: Guarded) -> None:
    with (
        closing(tier.connection(None)) as connection,
        pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
    ):
        send(connection, "/healthz", None)


@pytest.mark.parametrize(
    ("path", "edge", "prometheus"),
    [("/v1/infer", 200, 403), ("/v1/stages", 200, 200), ("/metrics", 403, 200)],
)
def test_a_key_does_what_its_scopes_allow(tier: Guarded, path: str, edge: int, prometheus: int) -> None:
    body = image() if path == "/v1/infer" else None
    assert tier.ask(path, tier.edge, body).status == edge
    assert tier.ask(path, tier.prometheus, body).status == prometheus
    for key in (None, "a-key-that-is-none"):
        refused = tier.ask(path, key, body)
        assert (refused.status, refused.json["code"]) == (401, "unauthorized")


def test_requests_are_counted_by_the_name_of_their_key(tier: Guarded) -> None:
    def counted() -> int:
        text = tier.ask("/metrics", tier.prometheus).body.decode()
        found = re.search(r'hawkvision_datacenter_key_requests_total\{key="edge",outcome="accepted"\} (\d+)\.0', text)
        assert found
        return int(found[1])

    before = counted()
    tier.ask("/v1/stages", tier.edge)
    assert counted() == before + 1


def test_a_sighup_to_the_launcher_makes_the_tier_read_its_keys_at_once(tier: Guarded) -> None:
    """The file's time changes all the while, and the tier reads a file by itself only once it has stopped changing."""
    with still_changing(tier.keys_file), closing(tier.connection(tier.own)) as connection:
        visitor = add_key(tier.keys_file, "signalled", [Scope.INFER])
        os.kill(tier.launcher, signal.SIGHUP)
        wait_until(lambda: send(connection, "/v1/stages", visitor).status == 200)


@contextmanager
def still_changing(path: Path) -> Iterator[None]:
    """Change a file's time every 50 ms until the block ends."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.05):
            path.touch()

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        yield
    finally:
        ended.set()
        toucher.join()


def test_keys_and_certificates_are_renewed_under_an_open_connection(tier: Guarded) -> None:
    def serial() -> str:
        with closing(tier.connection(tier.own)) as connection:
            connection.connect()
            assert isinstance(connection.sock, ssl.SSLSocket)
            return str((connection.sock.getpeercert() or {})["serialNumber"])

    visitor = add_key(tier.keys_file, "visitor", [Scope.INFER], rate=0.01)
    with closing(tier.connection(tier.own)) as connection:
        wait_until(lambda: send(connection, "/v1/stages", visitor).status == 200)
        limited = send(connection, "/v1/stages", visitor)
        assert limited.status == 429
        assert 30 <= int(limited.headers["retry-after"]) <= 100
        port = connection.sock.getsockname()[1]
        first = serial()
        tier.pair.become(tier.authority.certify("tier-again"))
        wait_until(lambda: serial() != first)
        remove_key(tier.keys_file, "visitor")
        wait_until(lambda: send(connection, "/v1/stages", visitor).status == 401)
        assert connection.sock.getsockname()[1] == port


def test_a_node_with_a_certificate_escalates_and_one_without_logs_what_is_missing(tier: Guarded, models: Path) -> None:
    """The node serves another task than the tier does, so what shows that it came through is the tier's own count."""
    env = {"HAWKVISION_EDGE_DATACENTER_API_KEY": tier.edge + "\n"}
    common = (
        "--port",
        "0",
        "--backend",
        "noop",
        "--datacenter-url",
        tier.url,
        "--datacenter-ca",
        str(tier.authority.path),
    )
    shows = ("--datacenter-certificate", str(tier.own.certificate), "--datacenter-key", str(tier.own.key))

    def asked() -> str:
        text = tier.ask("/metrics", tier.prometheus).body.decode()
        return "".join(line for line in text.splitlines() if line.startswith("hawkvision_datacenter_requests_total"))

    with running("edge", *common, env=env) as node, closing(Caller(node)) as caller:
        answer = caller.classify(image(), "quality=best")
        assert (answer.status, json.loads(answer.body)["degraded"]) == (200, True)
        wait_until(lambda: "(a datacenter may ask for edge.datacenter_certificate)" in node.output())
    before = asked()
    with running("edge", *common, *shows, env=env) as node, closing(Caller(node)) as caller:
        wait_until(lambda: caller.classify(image(), "quality=best").status == 200 and asked() != before)
        assert "TLS failed" not in node.output()
