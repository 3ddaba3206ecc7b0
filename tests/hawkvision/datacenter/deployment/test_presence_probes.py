"""Presence of replicas behind a handle whose probes are answered as scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from hawkvision.datacenter.deployment.messages import PROTOCOL, Presence, encode_presence
from hawkvision.datacenter.deployment.presence import PolledPresence, ServeStates
from tests.waiting import until

LIVE = encode_presence(Presence(PROTOCOL, "0", "statement"))


class ScriptedHandle:
    """Stands for Ray's handle: each probe gets the next reply, and waits without end when there is none left."""

    def __init__(self, *replies: bytes | Exception) -> None:
        self._replies: Iterator[bytes | Exception] = iter(replies)
        self.probes = 0
        self.on_probe: Callable[[], None] = lambda: None

    @property
    def present(self) -> ScriptedHandle:
        return self

    async def remote(self, protocol: int) -> bytes:
        self.probes += 1
        self.on_probe()
        reply = next(self._replies, None)
        if reply is None:
            await asyncio.Event().wait()
        if isinstance(reply, Exception):
            raise reply
        assert reply is not None
        return reply


class Controller(ServeStates):
    """Stands for Serve's controller, which says why the group has no replica; None if it has one."""

    def __init__(self, missing: str | None = None) -> None:
        super().__init__()
        self.missing = missing

    async def why_missing(self, group: str) -> str | None:
        return self.missing


def presence_of(
    handle: Any,
    changes: list[int],
    controller: Controller | None = None,
    on_problem: Callable[[str, str, bool], None] = lambda *_: None,
) -> PolledPresence:
    return PolledPresence(
        {"group": cast(DeploymentHandle, handle)},
        lambda _, live: changes.append(live),
        lambda _: None,
        on_problem,
        controller or Controller(),
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


FULL = BackPressureError(num_queued_requests=8, max_queued_requests=8)


@pytest.mark.parametrize("answered", [True, False])
def test_a_full_queue_shows_a_replica_only_if_requests_are_answered(answered: bool) -> None:
    async def scenario() -> list[int]:
        changes: list[int] = []
        handle = ScriptedHandle(LIVE, FULL)
        presence = presence_of(handle, changes)
        if answered:  # just before: no pause of the machine comes in between
            handle.on_probe = lambda: presence.record_reply("group")
        presence.start()
        await until(lambda: handle.probes == 3)
        return changes

    assert asyncio.run(scenario()) == ([0, 1] if answered else [0, 1, 0])


def test_a_full_queue_before_no_replica_makes_the_group_absent_although_requests_were_answered() -> None:
    async def scenario() -> list[int]:
        changes: list[int] = []
        handle, controller = ScriptedHandle(LIVE, FULL), Controller()
        presence = presence_of(handle, changes, controller)
        handle.on_probe = lambda: presence.record_reply("group")
        presence.start()
        await until(lambda: changes == [0, 1])
        controller.missing = ""
        await until(lambda: handle.probes == 3)
        return changes

    assert asyncio.run(scenario()) == [0, 1, 0]


@pytest.mark.parametrize("replies", [(), (DeploymentUnavailableError(DeploymentID("group", "app")),)])
def test_a_group_that_serve_starts_no_more_has_failed_with_serves_reason(replies: tuple[Exception, ...]) -> None:
    problems: list[tuple[str, str, bool]] = []

    async def scenario() -> None:
        changes: list[int] = []
        handle = ScriptedHandle(*replies)
        presence = presence_of(handle, changes, Controller("killed"), lambda *its: problems.append(its))
        presence.start()
        await presence.wait_until_probed()
        assert presence.is_absent("group")

    asyncio.run(scenario())
    assert problems == [("group", "killed", True)]


def test_presence_is_known_after_the_first_probe_and_not_before() -> None:
    async def scenario() -> None:
        changes: list[int] = []
        presence = presence_of(ScriptedHandle(LIVE), changes)
        presence.start()
        assert presence.is_absent("group")
        await presence.wait_until_probed()
        assert not presence.is_absent("group")

    asyncio.run(scenario())
