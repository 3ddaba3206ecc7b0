"""Whose evidence a request is: what one caller sends suspends nobody else, over real connections."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from edge.monitoring.stream_keys import caller_of
from edge.run import _listen, _uvicorn_server
from edge.servers.shared.frontend import Frontend
from edge.serving.tasks import ServedTasks
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.servers.connections import Limits
from hawkvision.servers.keyfile import ANYBODY, SINGLE
from hawkvision.servers.keys import Keys
from tests.edge.bench import SURE, Bench, bench, known, run
from tests.edge.peer import Peer
from tests.images import encoded
from tests.waiting import until

MALLORY, ALICE = "127.0.0.2", "127.0.0.1"


@pytest.mark.parametrize(
    ("key", "address", "caller"),
    [
        ("alice", "10.0.0.1", "key alice"),
        (ANYBODY, "10.0.0.1", "10.0.0.1"),
        (SINGLE, "10.0.0.1", "10.0.0.1"),
        (ANYBODY, "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        (ANYBODY, "::ffff:10.0.0.1", "10.0.0.1"),
        (ANYBODY, "somewhere", "somewhere"),
    ],
)
def test_a_caller_is_its_key_where_it_has_one_of_its_own_and_else_its_address(
    key: str, address: str, caller: str
) -> None:
    assert caller_of(key, address) == caller


@asynccontextmanager
async def served(it: Bench) -> AsyncIterator[int]:
    """The port at which the node is served, as `hawkvision edge up` does."""
    frontend = Frontend(it.node.metrics, it.clock, Keys(), 1_000_000)
    frontend.mark_ready(ServedTasks([it.node]))
    listener = _listen("127.0.0.1", 0)
    server = _uvicorn_server(frontend, Limits(100, 100), EdgeConfig(), None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def ask(port: int, source: str, path: str, count: int = 1, version: int = 11) -> Any:
    """The last answer; version 10 of HTTP goes uvicorn's way."""
    for _ in range(count):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30, source_address=(source, 0))) as it:
            it._http_vsn, it._http_vsn_str = version, f"HTTP/1.{version % 10}"  # type: ignore[attr-defined]
            it.request(*(("POST", path, encoded()) if "classify" in path else ("GET", path)))
            answer = json.loads(it.getresponse().read())
    return answer


@pytest.mark.parametrize("version", [10, 11])
def test_a_caller_suspends_itself_alone(large: Peer, version: int) -> None:
    large.differing = 1.0

    async def scenario() -> list[str]:
        async with bench(large, SURE, audit_share=0.2) as it, served(it) as port:
            await known(it.node)
            for _ in range(40):
                said = await asyncio.to_thread(ask, port, MALLORY, "/v1/classify?quality=fast", 10, version)
                if said["accuracy"]["status"] == "suspended":
                    break
            found = []
            for source in (MALLORY, ALICE):
                answer = await asyncio.to_thread(ask, port, source, "/v1/classify?quality=fast", 1, version)
                targets = await asyncio.to_thread(ask, port, source, "/v1/targets")
                found += [answer["accuracy"]["status"], targets["targets"][0]["accuracy"]["status"]]
            return found

    assert run(scenario) == ["suspended", "suspended", "certified", "certified"]
