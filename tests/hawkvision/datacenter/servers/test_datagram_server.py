"""The datacenter's datagram server over real sockets, its variants in memory."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography import x509

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import ConfigError, Unauthorized
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest, IntermediateOffer
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.core.trace_context import start_trace
from hawkvision.datacenter.ingress.application import application
from hawkvision.datacenter.servers.datagram_server import TierDatagramServer, useful_side
from hawkvision.datacenter.servers.service import TierService
from hawkvision.datacenter.stages.catalog import load_catalogs, loaded
from hawkvision.datacenter.stages.ensemble import EvaluationRequest, VariantAnswer
from hawkvision.servers.keyfile import Scope, add_key, remove_key
from hawkvision.servers.keys import Keys
from hawkvision.tasks.class_scores import Score
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.coding.image_coding import Coded, Plan, encode, opaque
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.frames import fragment_room
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.settings import DatagramSettings
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.datacenter.conftest import image
from tests.hawkvision.tasks.classes import read_reply, top_k
from tests.hawkvision.transport.protocol.test_identity import files
from tests.waiting import until

TRACE = start_trace()
ROOM = fragment_room(EscalationRequest().meta(TRACE))


def coded(body: bytes) -> Coded:
    made = opaque(body, 0.5, ROOM)
    assert made is not None
    return made


WHOLE = coded(image())


class Sure:
    """Variants that are sure of class 2, and wait for `gate` before they say so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.images: list[bytes] = []

    async def ask(
        self,
        evaluations: Sequence[EvaluationRequest],
        image: bytes,
        deadline: Deadline | None,
        *,
        streaming: bool,
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        self.images.append(image)
        row = np.array([0.0, 0.0, 0.9, 0.1] + [0.0] * 6, np.float32)
        for evaluation in evaluations:
            wanted = evaluation.wanted.items()
            answers = tuple(VariantAnswer(variant, views, row, 1.0, 2.0, 3.0, 4) for variant, views in wanted)
            if streaming:
                yield answers[:1]
            await self.gate.wait()
            yield answers


@asynccontextmanager
async def mark_ready(
    config: DatacenterConfig, keys: Keys | None = None
) -> AsyncIterator[tuple[TierDatagramServer, TierService, Sure]]:
    tier, variants = TierService(load_catalogs(config), 4), Sure()
    tier.set_variants("shapes", variants)
    server = await TierDatagramServer.open(config, 0, tier, keys or Keys(config.api_key))
    try:
        yield server, tier, variants
    finally:
        await server.close(1.0)


@asynccontextmanager
async def connected(
    server: TierDatagramServer, port: int | None = None, api_key: str | None = None
) -> AsyncIterator[ClientConnection]:
    offer = server.offer
    client = await ClientConnection.connect(
        port or offer.port, offer.certificate, offer.name, routes=[UdpRoute(None, "127.0.0.1")], api_key=api_key
    )
    try:
        yield client
    finally:
        await client.close()


async def asked(
    client: ClientConnection,
    request: EscalationRequest | None = None,
    image: Coded = WHOLE,
    meta: bytes = b"",
    **more: Any,
) -> tuple[Status, bytes]:
    request = request or EscalationRequest()
    return await client.ask(request.template(), image, meta=meta or request.meta(TRACE), timeout_s=60.0, **more)


def ask(
    config: DatacenterConfig, request: EscalationRequest, image: Coded = WHOLE, meta: bytes = b""
) -> tuple[Status, bytes]:
    async def scenario() -> tuple[Status, bytes]:
        async with mark_ready(config) as (server, _, _), connected(server) as client:
            return await asked(client, request, image, meta)

    return asyncio.run(scenario())


def replied(answer: tuple[Status, bytes]) -> EscalationReply:
    assert answer[0] is Status.OK, answer
    return read_reply(answer[1])


def test_an_image_is_answered_as_over_http(config: DatacenterConfig) -> None:
    reply = replied(ask(config, EscalationRequest(variant="medium", top_k=2)))
    assert (reply.model, [c.index for c in top_k(reply)]) == ("medium", [2, 3])
    assert (reply.received_fraction, reply.quality, reply.part) == (1.0, None, None)


def test_a_congestion_controller_that_there_is_not_is_refused(config: DatacenterConfig) -> None:
    async def scenario() -> None:
        features = (DatagramSettings(congestion_control="none"),)
        async with mark_ready(msgspec.structs.replace(config, features=features)):
            pass

    with pytest.raises(ConfigError, match="datagram_congestion_control"):
        asyncio.run(scenario())


def test_an_intermediate_stage_is_asked_first(config: DatacenterConfig) -> None:
    reply = replied(
        ask(config, EscalationRequest(variant="medium", intermediate=IntermediateOffer(Score.TOP1, 0.95, "reference")))
    )
    assert (reply.model, reply.passed_over is not None) == ("reference", True)


def test_the_answer_to_an_image_encoded_anew_says_its_quality_and_what_its_members_computed(
    config: DatacenterConfig,
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    reply = replied(ask(config, EscalationRequest(), encode(pixels, Plan(50, 1.0), ROOM)))
    assert (reply.quality, reply.complete, reply.comparable) == (50, True, False)
    assert reply.part is not None
    assert len(reply.part.members) == 2
    assert int(np.argmax(reply.part.output)) == top_k(reply)[0].index


@pytest.mark.parametrize(
    ("request_", "meta", "code"),
    [
        (EscalationRequest(variant="huge"), b"", "not_found"),
        (EscalationRequest(task="letters"), b"", "not_found"),
        (EscalationRequest(), b"\x09" * 30, "bad_field"),
    ],
)
def test_each_error_has_its_code(config: DatacenterConfig, request_: EscalationRequest, meta: bytes, code: str) -> None:
    status, body = ask(config, request_, meta=meta)
    assert (status, msgspec.json.decode(body)["code"]) == (Status.REFUSED, code)


def test_a_body_beyond_the_limit_is_refused(config: DatacenterConfig) -> None:
    status, body = ask(msgspec.structs.replace(config, max_body_bytes=100), EscalationRequest())
    assert (status, msgspec.json.decode(body)["code"]) == (Status.REFUSED, "too_large")


def test_a_tier_that_is_not_ready_replies_503(config: DatacenterConfig) -> None:
    async def scenario() -> tuple[Status, bytes]:
        async with mark_ready(config) as (server, tier, _), connected(server) as client:
            tier.set_variants("shapes", None)
            return await asked(client)

    status, body = asyncio.run(scenario())
    assert (status, msgspec.json.decode(body)["status"]) == (Status.REFUSED, 503)


def test_an_answer_that_comes_too_late_is_a_missed_deadline(config: DatacenterConfig) -> None:
    async def scenario() -> tuple[Status, bytes]:
        async with mark_ready(config) as (server, _, variants), connected(server) as client:
            variants.gate.clear()
            return await asked(client, deadline_s=0.2)

    status, body = asyncio.run(scenario())
    assert (status, msgspec.json.decode(body)["code"]) == (Status.REFUSED, "deadline_missed")


def test_a_progressive_request_gets_the_partial_result_just_before_its_deadline(config: DatacenterConfig) -> None:
    async def scenario() -> tuple[Status, bytes]:
        async with mark_ready(config) as (server, _, variants), connected(server) as client:
            variants.gate.clear()
            request = EscalationRequest(variant="reference", progressive=True)
            return await asked(client, request, deadline_s=0.3)

    reply = replied(asyncio.run(scenario()))
    assert (reply.model, top_k(reply)[0].index, reply.complete) == ("reference", 2, False)


@pytest.mark.parametrize("progressive", [True, False])
def test_a_progressive_request_gets_partial_results_at_once(config: DatacenterConfig, progressive: bool) -> None:
    received = list[bytes]()
    request = EscalationRequest(variant="reference", progressive=progressive)

    async def scenario() -> tuple[Status, bytes]:
        async with mark_ready(config) as (server, _, variants), connected(server) as client:
            variants.gate.clear()
            answer = asyncio.create_task(asked(client, request, on_interim=received.append))
            await until(lambda: bool(received) if progressive else bool(variants.images))
            variants.gate.set()
            return await answer

    assert replied(asyncio.run(scenario())).complete
    so_far = [read_reply(body) for body in received]
    assert [(part.model, part.complete) for part in so_far[:1]] == [("reference", False)] * progressive


def test_requests_inside_are_answered_before_the_server_closes(config: DatacenterConfig) -> None:
    async def scenario() -> tuple[Status, bytes]:
        async with mark_ready(config) as (server, _, variants), connected(server) as client:
            variants.gate.clear()
            asking = asyncio.create_task(asked(client))
            await until(lambda: bool(variants.images))
            closing = asyncio.create_task(server.close(10.0))
            variants.gate.set()
            answer = await asking
            await closing
            return answer

    assert top_k(replied(asyncio.run(scenario())))[0].index == 2


def test_an_incomplete_image_waits_for_its_deadline_and_reports_its_received_fraction(
    config: DatacenterConfig,
) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    holed = encode(pixels, Plan(50, 0.0), ROOM)

    async def scenario() -> EscalationReply:
        async with mark_ready(config) as (server, _, _):
            datagram = LinkSpec.parse("delay=20ms,seed=5")
            async with (
                UdpRelay(("127.0.0.1", server.offer.port), datagram) as relay,
                connected(server, relay.address[1]) as c,
            ):
                replied(await asked(c))
                relay.up = LinkSpec.parse("delay=20ms,loss=40%,seed=5")
                for _ in range(20):  # on a machine that stands still the deadline may pass before anything came
                    answer = await asked(c, image=holed, deadline_s=0.1)
                    if answer[0] is Status.OK:
                        break
                return replied(answer)

    reply = asyncio.run(scenario())
    assert 0.0 < reply.received_fraction < 1.0


def test_the_useful_side_is_that_of_the_most_demanding_variant(config: DatacenterConfig) -> None:
    assert useful_side(*loaded(load_catalogs(config)).values()) == 48


def test_a_cluster_does_not_offer_the_datagram_transport(config: DatacenterConfig) -> None:
    with pytest.raises(ConfigError, match=r"datagram_port.*one machine"):
        application(msgspec.structs.replace(config, features=(DatagramSettings(port=0),)))


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"datagram_certificate and dc\.datagram_key"):
        load_config(DatacenterConfig, overrides={"datagram_certificate": tmp_path / "c.pem"}, environ={})


def test_a_certificate_that_was_renewed_is_offered_and_shown_and_a_broken_one_changes_nothing(
    config: DatacenterConfig, tmp_path: Path
) -> None:
    certificate, key = files(tmp_path, [x509.DNSName("tier.example")])
    config = msgspec.structs.replace(config, features=(DatagramSettings(certificate=certificate, key=key),))

    async def scenario() -> list[str]:
        async with mark_ready(config) as (server, _, _), connected(server) as before:
            offers = [server.offer.certificate]
            files(tmp_path, [x509.DNSName("tier.example")])
            server.offered.reload()
            offers.append(server.offer.certificate)
            key.write_text("no key")
            with pytest.raises(ConfigError, match=r"node\.key"):
                server.offered.reload()
            offers.append(server.offer.certificate)
            async with connected(server) as after:
                for client in (before, after):
                    assert (await asked(client))[0] is Status.OK
            return offers

    first, second, third = asyncio.run(scenario())
    assert first != second == third


def test_an_image_is_refused_once_its_key_is_gone_or_has_used_up_its_rate(
    config: DatacenterConfig, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    key = add_key(file, "edge-1", [Scope.INFER], rate=1e-6)

    async def scenario() -> list[tuple[Status, str]]:
        keys = Keys(keys_file=file)
        async with mark_ready(config, keys) as (server, _, _), connected(server, api_key=key) as client:
            found = []
            for _ in range(3):
                status, body = await asked(client)
                found.append((status, "" if status is Status.OK else json.loads(body)["code"]))
                if len(found) == 2:
                    remove_key(file, "edge-1")
                    keys.reload()
            return found

    assert asyncio.run(scenario()) == [
        (Status.OK, ""),
        (Status.REFUSED, "overloaded"),
        (Status.REFUSED, "unauthorized"),
    ]


def test_datagrams_of_strangers_and_refused_callers_are_counted(config: DatacenterConfig) -> None:
    async def scenario() -> str:
        async with mark_ready(config, Keys("a-key-of-some-length")) as (server, tier, _):
            with pytest.raises(Unauthorized):
                async with connected(server, api_key="another-key-than-that"):
                    pass
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(b"\x11none" + bytes(60), ("127.0.0.1", server.offer.port))
                stranger.sendto(b"?" * 30, ("127.0.0.1", server.offer.port))
                await until(lambda: b'_datagrams_total{reason="malformed"} 1.0' in tier.metrics.exposition())
            return tier.metrics.exposition().decode()

    page = asyncio.run(scenario())
    for line in (
        'hawkvision_datacenter_datagram_dropped_datagrams_total{reason="no_session"} 1.0',
        'hawkvision_datacenter_datagram_dropped_datagrams_total{reason="malformed"} 1.0',
        'hawkvision_datacenter_datagram_dropped_datagrams_total{reason="bad_seal"} 0.0',
        'hawkvision_datacenter_datagram_refused_callers_total{reason="unauthorized"} 1.0',
        "hawkvision_datacenter_datagram_sessions 0.0",
    ):
        assert line in page
