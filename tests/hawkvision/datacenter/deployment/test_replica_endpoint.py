"""A replica as Serve calls it, without Serve: bytes in, bytes out."""

from __future__ import annotations

import asyncio
import time

import pytest

from hawkvision.core.errors import BadImage, DeadlineMissed, HawkVisionError, NotReady
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.messages import (
    PROTOCOL,
    Part,
    decode_presence,
    decode_reply,
    encode_request,
)
from hawkvision.datacenter.deployment.replica_endpoint import ReplicaEndpoint
from hawkvision.datacenter.execution.group_settings import group_settings, process_settings
from hawkvision.datacenter.stages.catalog import ServedStage, catalog_of
from hawkvision.datacenter.stages.ensemble import evaluation_requests
from hawkvision.models.manifest import Manifest
from tests.hawkvision.datacenter.conftest import image
from tests.hawkvision.tasks.classes import classes_of

ALL = evaluation_requests(ServedStage("reference", ("small", "medium"), mirrored=True))


@pytest.fixture
def served(manifest: Manifest, config: DatacenterConfig) -> ReplicaEndpoint:
    catalog = catalog_of(manifest, classes_of(manifest), config)
    (group,) = catalog.groups
    replica = ReplicaEndpoint(process_settings(group, catalog, config))
    asyncio.run(replica.reconfigure(group_settings(group, catalog, config).to_user_config()))
    return replica


def request(left_ms: float | None = None) -> bytes:
    return encode_request(ALL, left_ms, None)


def outcome(reply: bytes) -> tuple[Part, ...] | HawkVisionError:
    try:
        return decode_reply(reply)
    except HawkVisionError as error:
        return error


def test_both_ways_to_ask_give_the_views_of_all_members(served: ReplicaEndpoint) -> None:
    async def views() -> list[set[str]]:
        plain = decode_reply(await served.classify(PROTOCOL, image(), request()))
        parts = [decode_reply(each) async for each in served.classify_streaming(PROTOCOL, image(), request())]
        assert len(parts) > 1
        streamed = tuple(part for each in parts for part in each)
        return [{answer.variant for part in its for answer in part} for its in (plain, streamed)]

    assert asyncio.run(views()) == [{"small", "medium"}] * 2


def test_an_unreadable_image_is_a_reply_and_not_an_exception(served: ReplicaEndpoint) -> None:
    async def replies() -> list[bytes]:
        broken = image()[:600]
        plain = await served.classify(PROTOCOL, broken, request())
        return [plain, *[each async for each in served.classify_streaming(PROTOCOL, broken, request())]]

    assert [type(outcome(each)) for each in asyncio.run(replies())] == [BadImage, BadImage]


@pytest.mark.parametrize("days_off", [-3, 3])
def test_a_replica_whose_wall_clock_is_wrong_keeps_deadlines(
    served: ReplicaEndpoint, days_off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 86_400.0 * days_off)

    async def both() -> list[bytes]:
        return [await served.classify(PROTOCOL, image(), request(left_ms)) for left_ms in (60_000.0, -1.0)]

    assert [type(outcome(each)) for each in asyncio.run(both())] == [tuple, DeadlineMissed]


def test_a_caller_of_another_version_is_refused_before_its_request_is_read(served: ReplicaEndpoint) -> None:
    async def replies() -> list[bytes]:
        plain = await served.classify(PROTOCOL + 1, image(), b"of a form to come")
        return [plain, *[each async for each in served.classify_streaming(PROTOCOL + 1, image(), b"the same")]]

    assert [type(outcome(each)) for each in asyncio.run(replies())] == [NotReady, NotReady]


def test_a_replica_says_what_it_is_to_callers_of_any_version(served: ReplicaEndpoint) -> None:
    presence = decode_presence(asyncio.run(served.present(PROTOCOL + 1)))
    assert (presence.statement, presence.backends) == (served.replica.statement, ("noop",))
