"""Edge nodes as real processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hawkvision.system.child_server import ServerProcess, running
from tests.edge.peer import Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """One kept-alive connection to a node."""

    def __init__(self, server: ServerProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
        self._connection.request(method, path, body, headers or {})
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read())

    def classify(self, body: bytes, query: str = "", **headers: str) -> Reply:
        return self.send("POST", f"/v1/classify{'?' + query if query else ''}", body, headers)

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="session")
def peer() -> Iterator[Peer]:
    with running_peer() as peer:
        yield peer


@pytest.fixture(scope="session")
def edge(peer: Peer) -> Iterator[ServerProcess]:
    """A node on the no-op backend, whose datacenter is `peer`."""
    asked = ("--port", "0", "--backend", "noop", "--datacenter-url", peer.url, "--max-body-bytes", "300000")
    with running("edge", *asked) as node:
        yield node


@pytest.fixture
def caller(edge: ServerProcess, peer: Peer) -> Iterator[Caller]:
    """A connection to `edge`, with the peer on its best behaviour."""
    peer.delay_s, peer.status, peer.garbage = 0.0, 200, False
    caller = Caller(edge)
    yield caller
    caller.close()


@pytest.fixture
def large() -> Iterator[Peer]:
    """The datacenter of `tests.edge.bench`: it runs what was certified."""
    with running_peer(model="large", fingerprint=SHA) as peer:
        yield peer
