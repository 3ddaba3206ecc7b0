"""Presence of replicas behind a handle whose probes are answered as scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from hawkvision.datacenter.deployment.messages import PROTOCOL, Presence, encode_presence
from hawkvision.datacenter.deployment.presence import PolledPresence
from tests.waiting import until

LIVE = encode_presence(Presence(PROTOCOL, "0", "statement"))


class ScriptedHandle:
    """Stands for Ray's handle: each probe gets the next reply, and waits without end when there is none left."""

    def __init__(self, *replies: bytes | Exception) -> None:
        self._replies: Iterator[bytes | Exception] = iter(replies)
        self.probes = 0

    @property
    def present(self) -> ScriptedHandle:
        return self

    async def remote(self, protocol: int) -> bytes:
        self.probes += 1
        reply = next(self._replies, None)
        if reply is None:
            await asyncio.Event().wait()
        if isinstance(reply, Exception):
            raise reply
        assert reply is not None
        return reply


def presence_of(handle: Any, changes: list[int]) -> PolledPresence:
    return PolledPresence(
        {"group": cast(DeploymentHandle, handle)}, lambda _, live: changes.append(live), lambda _: None
    )


def test_a_probe_that_meets_a_dying_replica_does_not_make_the_group_absent() -> None:
    async def scenario() -> list[int]:
        changes: list[int] = []
        handle = ScriptedHandle(LIVE, RayActorError(), LIVE)
        presence_of(handle, changes).start()
        await until(lambda: handle.probes == 4)
        return changes

    assert asyncio.run(scenario()) == [0, 1]


def test_a_group_whose_probes_fail_twice_is_absent() -> None:
    async def scenario() -> list[int]:
        changes: list[int] = []
        handle = ScriptedHandle(LIVE, RayActorError(), RayActorError())
        presence_of(handle, changes).start()
        await until(lambda: handle.probes == 4)
        return changes

    assert asyncio.run(scenario()) == [0, 1, 0]


def test_presence_is_known_after_the_first_probe_and_not_before() -> None:
    async def scenario() -> None:
        changes: list[int] = []
        presence = presence_of(ScriptedHandle(LIVE), changes)
        presence.start()
        assert presence.is_absent("group")
        await presence.wait_until_probed()
        assert not presence.is_absent("group")

    asyncio.run(scenario())
