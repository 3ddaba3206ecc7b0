"""What an operator hears of changes: a line each, and gauges that show them at once."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edge.monitoring import datacenter_watch
from hawkvision.core.types import Answer, Quality, Tier
from tests.edge.bench import SURE, UNSURE, Bench, bench, known, run
from tests.edge.peer import Peer, running_peer
from tests.edge.serving.test_guarantees import raise_alarm
from tests.edge.serving.test_node import LATE_MS, doubted
from tests.hawkvision.cascade.synthetic import SHA
from tests.waiting import until


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hawkvision")


def lines(caplog: pytest.LogCaptureFixture, *beginnings: str) -> list[tuple[str, str]]:
    """Level and the first words of what was logged, as far as it begins like that."""
    found = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    return [(level, text) for level, text in found if text.startswith(beginnings)]


def gauge(it: Bench, name: str) -> float | None:
    return it.node.metrics.registry.get_sample_value(f"hawkvision_{name}", {"task": "digits"})


def test_a_datacenter_that_ends_is_missed_at_once_by_a_node_without_traffic_and_greeted_when_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datacenter_watch, "LIST_INTERVAL_S", 3600.0)

    async def scenario(it: Bench, url: str) -> None:
        await until(lambda: gauge(it, "datacenter_up") == 0.0)
        with running_peer(urlsplit(url).port or 0, model="large", fingerprint=SHA):
            await until(lambda: gauge(it, "datacenter_up") == 1.0)

    async def both() -> None:
        with running_peer(model="large", fingerprint=SHA) as peer:
            opened = bench(peer, SURE)
            it = await opened.__aenter__()
            await known(it.node)
            assert gauge(it, "datacenter_up") == 1.0
        try:
            await scenario(it, peer.url)
        finally:
            await opened.__aexit__(None, None, None)

    run(both)
    assert lines(caplog, "datacenter") == [
        ("INFO", "datacenter reached"),
        ("WARNING", "datacenter lost"),
        ("INFO", "datacenter back"),
    ]


def test_a_tier_that_is_still_loading_when_the_node_starts_answers_as_soon_as_it_can(large: Peer) -> None:
    """No request has to fail for that, and the node asks often enough to find it at once."""
    large.stages_status = 503

    async def scenario() -> list[Answer]:
        async with bench(large, UNSURE) as it:
            await until(lambda: gauge(it, "datacenter_up") == 0.0)
            asked = large.asked_for_stages
            await until(lambda: large.asked_for_stages >= asked + 25)  # at 5 s apart, `until` would time out
            large.stages_status = 200
            await until(lambda: gauge(it, "datacenter_up") == 1.0)
            return [await it.ask(target=Quality.BEST) for _ in range(3)]

    answers = run(scenario)
    assert {(answer.tier, answer.degraded) for answer in answers} == {(Tier.DATACENTER, False)}


@pytest.mark.parametrize("listing_refused", [False, True])
def test_a_key_that_the_datacenter_refuses_is_said_once_with_the_reason_and_so_is_that_it_is_taken(
    caplog: pytest.LogCaptureFixture, large: Peer, monkeypatch: pytest.MonkeyPatch, listing_refused: bool
) -> None:
    """Whether it may see what is served, as a key that may only observe, or nothing at all."""
    monkeypatch.setattr(datacenter_watch, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(datacenter_watch, "LONGEST_PROBE_S", 0.02)

    async def scenario() -> None:
        async with bench(large, UNSURE) as it:
            await known(it.node)
            large.error_code, large.stages_status, large.status = "forbidden", 403 if listing_refused else 200, 403
            assert (await it.ask(target=Quality.BEST)).degraded
            assert gauge(it, "datacenter_up") == 0.0
            asked = large.asked_for_stages
            await until(lambda: large.asked_for_stages > asked + 3)
            assert gauge(it, "datacenter_up") == 0.0
            assert not (await it.ask(target=Quality.BEST)).escalated
            large.stages_status = large.status = 200
            await until(lambda: gauge(it, "datacenter_up") == 1.0)
            assert (await it.ask(target=Quality.BEST)).tier is Tier.DATACENTER

    run(scenario)
    assert lines(caplog, "datacenter") == [
        ("INFO", "datacenter reached"),
        ("WARNING", "datacenter lost"),
        ("INFO", "datacenter back"),
    ]
    assert f"{large.url} refuses edge.datacenter_api_key: no" in caplog.text


def test_doubt_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture, large: Peer) -> None:
    async def scenario() -> None:
        async with bench(large, UNSURE) as it:
            datacenter = await doubted(it)
            assert gauge(it, "datacenter_doubted") == 1.0
            for _ in range(30):
                await it.ask(target=Quality.BEST, deadline_ms=LATE_MS)
                await until(lambda: datacenter._pending == 0)
                if gauge(it, "datacenter_doubted") == 0.0:
                    return

    run(scenario)
    assert lines(caplog, "datacenter doubted", "datacenter trusted") == [
        ("WARNING", "datacenter doubted"),
        ("INFO", "datacenter trusted again"),
    ]


def test_other_fingerprints_suspend_guarantees_and_the_certified_restore_them_a_line_each(
    caplog: pytest.LogCaptureFixture, large: Peer
) -> None:
    async def scenario() -> None:
        async with bench(large, SURE) as it:
            await known(it.node)
            assert it.node.datacenter is not None
            for fingerprint, valid in (("f" * 64, 0.0), ("f" * 64, 0.0), (SHA, 1.0)):
                large.fingerprint = fingerprint
                it.node.datacenter.lost.set()
                await until(lambda: not it.node.datacenter.lost.is_set())  # type: ignore[union-attr]
                await until(lambda valid=valid: it.counted("certificates_valid") == valid)  # type: ignore[misc]

    run(scenario)
    assert lines(caplog, "guarantees") == [("WARNING", "guarantees suspended"), ("INFO", "guarantees restored")]


@pytest.mark.parametrize(("stream", "level"), [(None, "WARNING"), ("rainy camera", "INFO")])
def test_an_alarm_of_a_caller_is_a_warning_and_one_of_a_named_stream_is_not(
    caplog: pytest.LogCaptureFixture, large: Peer, stream: str | None, level: str
) -> None:
    async def scenario() -> None:
        async with bench(large, SURE, audit_share=0.2) as it:
            await raise_alarm(it, stream)

    run(scenario)
    assert lines(caplog, "guarantee ") == [(level, "guarantee suspended")]


def test_a_guarantee_that_was_suspended_before_a_restart_is_said_to_be_at_the_start(
    caplog: pytest.LogCaptureFixture, large: Peer, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(large, SURE, audit_share=0.2, state_file=tmp_path / "state.sqlite3") as it:
            await raise_alarm(it)
        caplog.clear()
        async with bench(large, SURE, state_file=tmp_path / "state.sqlite3") as it:
            await known(it.node)

    run(scenario)
    assert lines(caplog, "guarantee ") == [("WARNING", "guarantee suspended")]


def test_a_change_of_transport_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(peer: Peer) -> None:
        async with bench(peer, UNSURE, transport="datagram") as it:
            await until(lambda: gauge(it, "datacenter_up") == 1.0 and it.node.datacenter.transport.value == "datagram")  # type: ignore[union-attr]
            for _ in range(3):
                await it.ask(target=Quality.BEST, deadline_ms=5_000.0)

    with running_peer(datagram=True, model="large", fingerprint=SHA) as peer:
        asyncio.run(scenario(peer))
    assert len(peer.datagrams) == 3
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("images go to")]
    assert [text.split(",")[0] for text in said] == [f"images go to {peer.url} over datagram"]
