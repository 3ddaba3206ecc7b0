"""Images as datagrams, from the client to a real node, over links that lose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from cryptography import x509

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.blocking import Client
from hawkvision.client.response import Unreachable
from hawkvision.core.errors import (
    BadField,
    BadImage,
    ConfigError,
    DeadlineMissed,
    NotFound,
    NotReady,
    TargetUnreachable,
    TooLarge,
    Unauthorized,
    UnsupportedMedia,
)
from hawkvision.core.types import AccuracyStatus, Answer, Tier
from hawkvision.system.child_server import ServerProcess, running
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.protocol.test_identity import files
from tests.images import encoded
from tests.system.conftest import Up
from tests.system.test_both_tiers import CAT, wait_for_certificates
from tests.waiting import WAIT_LIMIT_S, wait_until

IMAGE = encoded(height=200, width=300)
MOST_UNTIL_KNOWN = 40
"""Images that are sent before the link must be known to be quick: a machine that stood still is taken for loss."""
NOOP = ("edge", "--port", "0", "--datagram-port", "0", "--backend", "noop")


@dataclass
class Link:
    """A node behind an emulated link: its datagrams pass a relay, and a front says so in the node's place."""

    url: str
    relay: UdpRelay
    loop: asyncio.AbstractEventLoop

    def cut(self) -> None:
        """From now on nothing passes."""
        self.loop.call_soon_threadsafe(self.relay.blackhole, True)


def offer_of(url: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/v1/transport", timeout=60) as reply:
        offered: dict[str, object] = json.load(reply)["datagram"]
        return offered


@contextlib.contextmanager
def behind(url: str, link: str) -> Iterator[Link]:
    """The node at `url` behind a link; only `/v1/transport` is answered there over HTTP."""
    offered = offer_of(url)
    ready: asyncio.Queue[Link] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        port = offered["port"]
        assert isinstance(port, int)
        spec = LinkSpec.parse(link)
        async with UdpRelay(("127.0.0.1", port), spec) as relay:

            async def transport(_: web.Request) -> web.Response:
                return web.json_response({"datagram": {**offered, "port": relay.address[1]}})

            app = web.Application()
            app.router.add_get("/v1/transport", transport)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            front = runner.addresses[0]
            ready.put_nowait(Link(f"http://{front[0]}:{front[1]}", relay, loop))
            await stop.wait()
            await runner.cleanup()

    serving = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    serving.start()
    try:
        yield asyncio.run_coroutine_threadsafe(ready.get(), loop).result(WAIT_LIMIT_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        serving.join()
        loop.close()


@pytest.fixture(scope="module")
def noop() -> Iterator[ServerProcess]:
    """A node that answers at once, whatever it is shown."""
    with running(*NOOP) as node:
        yield node


@pytest.fixture
def datagram(noop: ServerProcess) -> Iterator[Client]:
    with Client(noop.url, transport="datagram") as client:
        yield client


# ------------------------------------------------------------------------------------------------- answers and errors


def test_the_node_says_where_it_listens_and_prints_it(noop: ServerProcess) -> None:
    offered = offer_of(noop.url)
    assert str(offered["certificate"]).startswith("-----BEGIN CERTIFICATE-----")
    assert f"datagram: udp://127.0.0.1:{offered['port']}" in noop.output()


def test_images_paths_and_pixels_are_answered(datagram: Client, tmp_path: object) -> None:
    pixels = np.full((300, 300, 3), 128, np.uint8)
    answers = [datagram.classify(image, quality="fast") for image in (IMAGE, pixels, CAT)]
    assert all(isinstance(answer, Answer) and answer.received_fraction == 1.0 for answer in answers)
    assert datagram.targets()["task"] == "imagenet"
    assert datagram.health().ready


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"quality": "nonsense"}, BadField),
        ({"deadline_ms": -1.0}, BadField),
        ({"deadline_ms": 1e9}, BadField),
        ({"stream": "x" * 200}, BadField),
        ({"task": "other"}, NotFound),
        ({"min_accuracy": 0.9999}, TargetUnreachable),
    ],
)
def test_errors_of_fields_are_those_of_http(
    noop: ServerProcess, datagram: Client, fields: dict[str, object], error: type[Exception]
) -> None:
    said = []
    with Client(noop.url) as http:
        for client in (http, datagram):
            with pytest.raises(error) as caught:
                client.classify(IMAGE, **fields)  # type: ignore[arg-type]
            said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("image", "error"),
    [
        (b"", BadImage),
        (b"%PDF-1.7 and so on", UnsupportedMedia),
        (CAT.read_bytes()[:90_000], BadImage),
        (np.zeros((4, 4), np.uint8), BadField),
    ],
)
def test_what_is_no_image_is_refused_and_the_next_one_answered(
    datagram: Client, image: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        datagram.classify(image)
    assert datagram.classify(IMAGE).top_k


def test_streams_deadlines_and_targets_arrive(datagram: Client) -> None:
    answer = datagram.classify(IMAGE, stream="Tür 3", deadline_ms=5_000.0, top_k=3, max_accuracy_drop=0.03)
    assert (len(answer.top_k), answer.deadline_met) == (3, True)
    assert datagram.classify(IMAGE, stream="s" * 100, deadline_ms=100_000.0, on_miss="wait").deadline_met is True


def test_a_wrong_key_is_unauthorized_at_either_server() -> None:
    with running(*NOOP, "--api-key", "a-secret-of-ours") as node:
        for transport in ("http", "datagram"):
            with Client(node.url, api_key="wrong", transport=transport) as client, pytest.raises(Unauthorized):
                client.classify(IMAGE)
        with Client(node.url, api_key="a-secret-of-ours", transport="datagram") as client:
            assert client.classify(IMAGE).top_k


@pytest.mark.slow
def test_a_certificate_that_is_replaced_while_the_node_runs_is_offered_and_shown(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, [x509.DNSName("edge.example")])
    with running(*NOOP, "--datagram-certificate", str(certificate), "--datagram-key", str(key)) as node:
        before = offer_of(node.url)
        files(tmp_path, [x509.DNSName("edge.example")])
        end = time.monotonic() + WAIT_LIMIT_S
        while offer_of(node.url) == before:
            assert time.monotonic() < end, "the files were not read again"
        with Client(node.url, transport="datagram") as client:
            assert client.classify(IMAGE).top_k
        assert offer_of(node.url)["certificate"] == certificate.read_text()


def test_a_node_without_a_datagram_server_says_so() -> None:
    with running("edge", "--port", "0", "--backend", "noop") as node, Client(node.url, transport="datagram") as client:
        with pytest.raises(ConfigError, match="does not listen for datagrams"):
            client.classify(IMAGE)
        assert offer_of(node.url) is None
        assert "datagram:" not in node.output()


def test_bodies_beyond_the_nodes_bound_are_too_large() -> None:
    large = encoded(height=500, width=500)
    with running(*NOOP, "--max-body-bytes", "2000") as node, Client(node.url, transport="datagram") as client:
        assert client.classify(encoded(".png", 16, 16)).top_k
        with pytest.raises(TooLarge):
            client.classify(large, deadline_ms=5_000.0)


def test_more_callers_than_may_be_under_way_are_all_answered(noop: ServerProcess) -> None:
    """Each one's time begins when its image is sent, so all together may take longer than the time of one."""
    with Client(noop.url, transport="datagram") as client:
        client.classify(IMAGE)
        began = time.monotonic()
        for _ in range(10):
            client.classify(IMAGE)
        each_s = (time.monotonic() - began) / 10

    async def ask(callers: int, timeout_s: float) -> list[Answer | BaseException]:
        async with AsyncClient(noop.url, transport="datagram", connections=1, timeout_s=timeout_s) as client:
            asked = (client.classify(IMAGE) for _ in range(callers))
            return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(ask(150, timeout_s=50 * each_s))
    assert [outcome for outcome in outcomes if not isinstance(outcome, Answer)] == []


def test_command_line_asks_over_datagrams(noop: ServerProcess) -> None:
    command = [sys.executable, "-m", "hawkvision.cli", "classify", "--datagram", "--json", "--url", noop.url, str(CAT)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["received_fraction"] == 1.0


def test_certificate_and_key_of_the_operators_own_are_used_and_belong_together(tmp_path: object) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", *NOOP, "--datagram-certificate", "c.pem"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1
    assert "belong together" in ran.stderr


# ------------------------------------------------------------------------------------------------- links that lose


def test_all_images_are_answered_at_20_percent_loss(noop: ServerProcess) -> None:
    spec = "rate=50mbit,delay=5ms,loss=20%,queue=100kB,seed=5"
    with behind(noop.url, spec) as link, Client(link.url, transport="datagram") as client:
        answers = [client.classify(IMAGE) for _ in range(30)]
    assert len(answers) == 30


def test_two_clients_at_once_do_not_disturb_one_another(noop: ServerProcess) -> None:
    async def ask(url: str) -> int:
        async with AsyncClient(url, transport="datagram") as client:
            answers = await asyncio.gather(*(client.classify(IMAGE, top_k=n % 9 + 1) for n in range(20)))
            return sum(len(answer.top_k) == n % 9 + 1 for n, answer in enumerate(answers))

    async def both() -> tuple[int, int]:
        first, second = await asyncio.gather(ask(link.url), ask(link.url))
        return first, second

    with behind(noop.url, "rate=50mbit,delay=2ms,loss=5%,queue=400kB,seed=6") as link:
        assert asyncio.run(both()) == (20, 20)


def test_a_deadline_on_a_starved_link_is_answered_in_part_or_said_to_be_missed(noop: ServerProcess) -> None:
    """At 200 kbit/s an image takes half a second. Nothing is ever silent, and no part guaranteed as if it were all."""
    came: list[Answer] = []
    missed = 0
    spec = "rate=200kbit,delay=10ms,loss=30%,queue=30kB,seed=7"
    with behind(noop.url, spec) as link, Client(link.url, transport="datagram", timeout_s=20.0) as client:
        for _ in range(12):
            try:
                came.append(client.classify(IMAGE, deadline_ms=300.0))
            except DeadlineMissed:
                missed += 1
    assert len(came) + missed == 12
    parts = [answer for answer in came if answer.received_fraction < 1.0]
    assert parts or missed
    assert all(answer.accuracy.status is not AccuracyStatus.CERTIFIED for answer in parts), (
        "the noop backend is not certified"
    )


def test_a_dead_link_is_unreachable_within_the_time(noop: ServerProcess) -> None:
    with behind(noop.url, "loss=0%") as link, Client(link.url, transport="datagram", timeout_s=2.0) as client:
        wait_until(lambda: is_answered(client))
        link.cut()
        with pytest.raises(Unreachable):
            client.classify(IMAGE)
        for on_miss in ("degrade", "fail"):
            with pytest.raises(DeadlineMissed):
                client.classify(IMAGE, deadline_ms=100.0, on_miss=on_miss)


def is_answered(client: Client) -> bool:
    """Whether an image is answered within the client's time, which a busy machine may miss."""
    try:
        return bool(client.classify(IMAGE).top_k)
    except Unreachable:
        return False


def test_a_dead_node_is_unreachable() -> None:
    with Client("http://127.0.0.1:9", transport="datagram", timeout_s=5.0) as client, pytest.raises(Unreachable):
        client.classify(IMAGE)


# ------------------------------------------------------------------------------------------------- starts and stops


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_node_is_found_again(stopped_by: signal.Signals) -> None:
    with running(*NOOP) as first:
        http, udp = first.port, offer_of(first.url)["port"]
        client = Client(first.url, transport="datagram")
        client.classify(IMAGE)
        first.stop(stopped_by)
    with client, running("edge", "--port", str(http), "--datagram-port", str(udp), "--backend", "noop"):
        assert client.classify(IMAGE).top_k, "with another certificate, which the node made at its start"


def test_stopping_answers_what_was_accepted_as_datagrams() -> None:
    with running(*NOOP) as node, behind(node.url, "delay=20ms,loss=5%,seed=8") as link:
        with Client(link.url, transport="datagram", timeout_s=20.0) as client, ThreadPoolExecutor(8) as pool:
            client.classify(IMAGE)
            pending = [pool.submit(client.classify, IMAGE) for _ in range(16)]
            next(iter(pending)).result()
            assert node.stop() == 0
            ended = [future.exception() for future in pending]
        assert sum(error is None for error in ended) >= 1
        assert all(error is None or isinstance(error, Unreachable | NotReady) for error in ended), ended
        assert "Traceback" not in node.output()


# ------------------------------------------------------------------------------------------------- the real cascade


@pytest.fixture(scope="module")
def node(both: Up) -> Iterator[ServerProcess]:
    """A node that takes datagrams, before the datacenter that others use as well."""
    words = ("--port", "0", "--datagram-port", "0", "--datacenter-url", both.address("datacenter"))
    with running("edge", *words) as edge:
        yield edge


@pytest.mark.slow
def test_answers_are_those_of_http_where_nothing_is_lost(node: ServerProcess) -> None:
    small = encoded(".png", 32, 32)  # sent as it is, so that guarantees are the same, too
    with Client(node.url) as http, Client(node.url, transport="datagram") as datagram:
        wait_for_certificates(http)
        for quality in ("fast", "balanced", "best"):
            assert http.classify(CAT, quality=quality).label == datagram.classify(CAT, quality=quality).label
            over_http, over_udp = (client.classify(small, quality=quality) for client in (http, datagram))
            assert (over_http.label, over_http.model) == (over_udp.label, over_udp.model)
            assert over_http.accuracy == over_udp.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("deadline_ms", [None, 20_000.0])
def test_images_escalate_as_they_were_received(node: ServerProcess, deadline_ms: float | None) -> None:
    with Client(node.url, transport="datagram") as datagram:
        answer = datagram.classify(CAT, quality="best", deadline_ms=deadline_ms)
    assert (answer.tier, "cat" in answer.label) == (Tier.DATACENTER, True)
    coded_anew = deadline_ms is not None
    assert answer.degraded == coded_anew, "the reference stage on an image coded anew is below itself on the original"


@pytest.mark.slow
def test_over_a_quick_link_an_image_with_a_deadline_is_answered_and_guaranteed_as_over_http(
    node: ServerProcess,
) -> None:
    with Client(node.url) as http, Client(node.url, transport="datagram") as datagram:
        wait_for_certificates(http)
        wanted = http.classify(CAT, quality="best")
        for _ in range(MOST_UNTIL_KNOWN):
            answer = datagram.classify(CAT, quality="best", deadline_ms=20_000.0)
            if not answer.degraded:
                break
    assert (answer.label, answer.accuracy, answer.degraded) == (wanted.label, wanted.accuracy, False)
    assert answer.accuracy.status is AccuracyStatus.CERTIFIED
