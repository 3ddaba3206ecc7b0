"""Which groups are live, by the answers of a stand-in for Serve's handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, NotReady
from hawkvision.datacenter.deployment.handles import HandleVariants
from hawkvision.datacenter.deployment.messages import PROTOCOL, Presence, encode_presence
from hawkvision.datacenter.deployment.presence import PolledPresence
from hawkvision.datacenter.stages.catalog import Group, ServedStage
from hawkvision.datacenter.stages.ensemble import evaluation_requests
from hawkvision.models.manifest import Manifest

LIMIT_S = 60.0
LIVE = encode_presence(Presence(PROTOCOL, "0.0.0", "statement"))


class Handle:
    """As Serve's handle to a deployment whose replicas say `reply`, or fail with it, and never answer an image."""

    def __init__(self, reply: bytes | Exception) -> None:
        self.reply = reply
        self.cancelled = 0

    def options(self, **_: object) -> Handle:
        return self

    @property
    def present(self) -> Any:
        return Remote(self._present)

    @property
    def classify(self) -> Any:
        return Remote(self._never)

    @property
    def classify_streaming(self) -> Any:
        return Remote(self._never)

    async def _present(self) -> bytes:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    async def _never(self) -> bytes:
        try:
            return await asyncio.Event().wait() and b""
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Remote:
    def __init__(self, method: Callable[[], Awaitable[bytes]]) -> None:
        self._method = method

    def remote(self, *_: object) -> Response:
        return Response(self._method())


class Response:
    def __init__(self, reply: Awaitable[bytes]) -> None:
        self._reply = reply

    def __await__(self) -> Any:
        return self._reply.__await__()

    def cancel(self) -> None:
        pass


async def probed(
    handle: Handle, manifest: Manifest, on_problem: Callable[[str, str, bool], None] = lambda *_: None
) -> tuple[PolledPresence, HandleVariants, asyncio.Queue[int]]:
    """Presence and access over this handle, and the changes of the group."""
    changes: asyncio.Queue[int] = asyncio.Queue()
    its = cast(DeploymentHandle, handle)
    presence = PolledPresence({"small": its}, lambda _, live: changes.put_nowait(live), lambda _: None, on_problem)
    presence.start()
    assert await changes.get() == 0
    return presence, HandleVariants([Group("small", manifest.variants[:1])], [its], presence), changes


async def ask(variants: HandleVariants, deadline: Deadline | None = None) -> None:
    evaluations = evaluation_requests(ServedStage("small", ("small",)))
    await anext(variants.ask(evaluations, b"", deadline, streaming=False))


def test_an_image_that_waits_fails_as_soon_as_the_last_replica_is_gone(manifest: Manifest) -> None:
    async def scenario() -> None:
        handle = Handle(LIVE)
        presence, variants, changes = await probed(handle, manifest)
        assert await asyncio.wait_for(changes.get(), LIMIT_S) == 1
        waiting = asyncio.create_task(ask(variants))
        async with asyncio.timeout(LIMIT_S):
            while not presence.waiting("small"):  # noqa: ASYNC110
                await asyncio.sleep(0)
        handle.reply = ActorDiedError()
        with pytest.raises(NotReady, match="'small' has no live replica"):
            await asyncio.wait_for(waiting, LIMIT_S)
        assert (handle.cancelled, presence.waiting("small")) == (1, set())
        with pytest.raises(NotReady, match="'small' has no live replica"):
            await ask(variants)

    asyncio.run(scenario())


def test_an_image_that_waits_is_cancelled_at_its_deadline(manifest: Manifest) -> None:
    async def scenario() -> int:
        handle = Handle(LIVE)
        _, variants, changes = await probed(handle, manifest)
        assert await asyncio.wait_for(changes.get(), LIMIT_S) == 1
        with pytest.raises(DeadlineMissed):
            await ask(variants, Deadline.after_s(0.01, asyncio.get_running_loop().time()))
        return handle.cancelled

    assert asyncio.run(scenario()) == 1


def test_a_replica_of_another_version_counts_as_none_and_the_log_names_both(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        handle = Handle(encode_presence(Presence(PROTOCOL + 1, "9.8.7")))
        presence, variants, changes = await probed(handle, manifest)
        async with asyncio.timeout(LIMIT_S):
            while not presence.problem("small"):  # noqa: ASYNC110
                await asyncio.sleep(0)
        with pytest.raises(NotReady, match=rf"no live replica: .*speaks {PROTOCOL + 1} "):
            await ask(variants)
        assert changes.empty()
        handle.reply = LIVE
        assert await asyncio.wait_for(changes.get(), LIMIT_S) == 1
        assert presence.problem("small") == ""

    asyncio.run(scenario())
    assert f"speaks {PROTOCOL + 1} (9.8.7) and this server {PROTOCOL}" in caplog.text


def test_refused_settings_are_reported_while_the_replica_serves(manifest: Manifest) -> None:
    problems: list[tuple[str, str, bool]] = []

    async def scenario() -> str:
        handle = Handle(encode_presence(Presence(PROTOCOL, "0.0.0", refused="no such file")))
        presence, _, changes = await probed(handle, manifest, lambda *problem: problems.append(problem))
        assert await asyncio.wait_for(changes.get(), LIMIT_S) == 1
        return presence.problem("small")

    assert asyncio.run(scenario()) == "no such file"
    assert problems == [("small", "no such file", False)]


def test_a_replica_without_models_counts_as_none_until_it_has_loaded_them(manifest: Manifest) -> None:
    problems: list[tuple[str, str, bool]] = []

    async def scenario() -> None:
        handle = Handle(encode_presence(Presence(PROTOCOL, "0.0.0", failed="no such file")))
        presence, variants, changes = await probed(handle, manifest, lambda *problem: problems.append(problem))
        await asyncio.wait_for(presence.wait_until_probed(), LIMIT_S)
        with pytest.raises(NotReady, match="'small' has no live replica: no such file"):
            await ask(variants)
        assert changes.empty()
        handle.reply = LIVE
        assert await asyncio.wait_for(changes.get(), LIMIT_S) == 1

    asyncio.run(scenario())
    assert problems == [("small", "no such file", True), ("small", "", False)]
