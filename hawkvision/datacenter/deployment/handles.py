"""Requests to replicas: over the local socket, or through Serve's handles with Serve's errors translated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any, Final, Protocol, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import HawkVisionError, NotReady, Overloaded
from hawkvision.core.logs import current_request
from hawkvision.datacenter.local_socket.protocol import Part, PeerClosed, ReplicaRequest, no_replica
from hawkvision.datacenter.local_socket.registry import ReplicaRegistry
from hawkvision.datacenter.stages.catalog import Group
from hawkvision.datacenter.stages.ensemble import EvaluationRequest

_RETRY_AFTER_S: Final = 1.0
"""How long a shed caller should wait. A full queue of 128 at 8 a batch and 50 ms a batch drains in 0.8 s."""

AnswerT = TypeVar("AnswerT")


class ReplicaPresence(Protocol):
    """Knows which groups have live replicas."""

    def wait_until_absent(self, group: str) -> Coroutine[Any, Any, None]:
        """Return once no replica of the group is live."""
        ...

    def record_reply(self, group: str) -> None:
        """A replica of the group has answered a request."""
        ...


class HandleVariants:
    """The server's access to the replicas: see `cascade_executor.Variants`."""

    def __init__(
        self,
        groups: Sequence[Group],
        handles: Sequence[DeploymentHandle],
        presence: ReplicaPresence | None = None,
        local: ReplicaRegistry | None = None,
    ) -> None:
        """Access to `groups` by their `handles`, or by `local` if it is given.

        With `presence`, a request to a group without live replicas fails; without, Serve's router lets it wait.
        """
        self._groups = {v.name: (g.name, handle) for g, handle in zip(groups, handles, strict=True) for v in g.variants}
        self._presence = presence
        self._local = local

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[Part]:
        """See `cascade_executor.Variants.ask`.

        The members of a stage are all in one group, and stages that share a member are in the same group.
        """
        by_group = groupby(evaluations, lambda evaluation: self._groups[next(iter(evaluation.wanted))])
        for (group, handle), of_group in by_group:
            left = None if deadline is None else deadline.remaining_ms(time.monotonic())
            request = ReplicaRequest(image, tuple(of_group), left, streaming, current_request())
            if self._local is not None:
                answer = self._local.ask(group, request)
            else:
                answer = self._through_ray(group, handle, request)
            async with aclosing(answer) as parts:
                async for part in parts:
                    yield part

    async def _through_ray(self, group: str, handle: DeploymentHandle, request: ReplicaRequest) -> AsyncGenerator[Part]:
        """The answer by Serve's handle; tries again once if the replica dies before its first part.

        Raises:
            NotReady: if there is no replica; Serve would wait for one without end.
        """
        call = _streaming_call if request.streaming else _plain_call
        for tries_left in (1, 0):
            replied = False
            try:
                through = call(group, handle, request)
                async with aclosing(through), aclosing(self._while_present(group, through)) as parts:
                    async for part in parts:
                        replied = True
                        if self._presence is not None:
                            self._presence.record_reply(group)
                        yield part
            except PeerClosed:
                if replied or not tries_left:
                    raise
            else:
                return

    def _while_present(self, group: str, parts: AsyncGenerator[Part]) -> AsyncGenerator[Part]:
        return parts if self._presence is None else _until(self._presence.wait_until_absent(group), parts, group)

    async def backends(self) -> str:
        """The replicas' backends, each once, separated by commas."""
        handles = dict(self._groups.values())
        replies = await asyncio.gather(*(handle.backends.remote() for handle in handles.values()))
        return ",".join(dict.fromkeys(name for names in replies for name in names))


async def _until(
    absent: Coroutine[Any, Any, None], parts: AsyncGenerator[AnswerT], group: str
) -> AsyncGenerator[AnswerT]:
    """The parts, as long as the group has a live replica.

    Raises:
        NotReady: once it has none.
    """
    leaving = asyncio.ensure_future(absent)
    coming: asyncio.Task[AnswerT | None] | None = None
    try:
        await asyncio.sleep(0)  # lets `leaving` begin
        while True:
            if leaving.done():
                raise no_replica(group)
            coming = asyncio.create_task(_next(parts))
            await asyncio.wait((leaving, coming), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                if (part := coming.result()) is None:
                    return
                yield part
    finally:
        leaving.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def _next(parts: AsyncGenerator[AnswerT]) -> AnswerT | None:
    return await anext(parts, None)


async def _streaming_call(group: str, handle: DeploymentHandle, request: ReplicaRequest) -> AsyncGenerator[Part]:
    remote = handle.options(stream=True).classify_streaming
    stream = remote.remote(request.image, request.evaluations, request.remaining_ms, request.request)
    try:
        while (part := await _translated(group, anext(stream, None))) is not None:
            yield part
    finally:
        stream.cancel()  # does nothing once it has ended


async def _plain_call(group: str, handle: DeploymentHandle, request: ReplicaRequest) -> AsyncGenerator[Part]:
    response = handle.classify.remote(request.image, request.evaluations, request.remaining_ms, request.request)
    try:
        parts: tuple[Part, ...] = await _translated(group, response)
    except asyncio.CancelledError:
        response.cancel()
        raise
    for part in parts:
        yield part


async def _translated(group: str, reply: Awaitable[AnswerT | HawkVisionError]) -> AnswerT:
    """The reply of a replica of the group.

    Raises:
        HawkVisionError: the replica's own, or Serve's in our terms.
    """
    try:
        answer = await reply
    except BackPressureError:
        raise Overloaded(f"the queue of {group!r} is full", _RETRY_AFTER_S) from None
    except RayActorError as error:
        raise PeerClosed(f"a replica of {group!r} is gone: {type(error).__name__}") from None
    except DeploymentUnavailableError as error:
        raise NotReady(f"{group!r} has no live replica: {type(error).__name__}") from None
    if isinstance(answer, HawkVisionError):
        raise answer
    return answer
