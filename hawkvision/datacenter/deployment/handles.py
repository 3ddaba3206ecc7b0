"""Requests to replicas through Serve's handles, with Serve's errors translated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeAlias, TypeVar

import grpc
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, NotReady, Overloaded
from hawkvision.core.logs import RequestIds, current_request
from hawkvision.datacenter.deployment.messages import (
    PROTOCOL,
    Part,
    Presence,
    decode_presence,
    decode_reply,
    encode_request,
)
from hawkvision.datacenter.deployment.presence import PolledPresence
from hawkvision.datacenter.stages.catalog import Group
from hawkvision.datacenter.stages.ensemble import EvaluationRequest

_RETRY_AFTER_S: Final = 1.0
"""How long a shed caller should wait. A full queue of 128 at 8 a batch and 50 ms a batch drains in 0.8 s."""
_TRIES: Final = 2
"""Replicas that one request is sent to, if the first is gone before it has answered anything."""

AnswerT = TypeVar("AnswerT")


class ReplicaGone(NotReady):
    """The replica is gone; another one may take the request."""


_Methods: TypeAlias = tuple[Any, Any]
"""A replica's `classify` and `classify_streaming` as Serve calls them."""


def _methods(handle: DeploymentHandle) -> _Methods:
    """Those of a group's handle; needs a running event loop."""
    # By gRPC wherever this runs: else Serve would put large images into Ray's object store. Cloudpickle, Serve's
    # default, takes longer, and these arguments are numbers and bytes.
    direct = handle.options(_by_reference=False, request_serialization="pickle", response_serialization="pickle")
    return direct.classify, direct.options(stream=True).classify_streaming


@dataclass(frozen=True, slots=True)
class _Call:
    """One image for one group."""

    group: str
    methods: _Methods
    image: bytes
    evaluations: tuple[EvaluationRequest, ...]
    deadline: Deadline | None
    request: RequestIds | None

    def message(self) -> tuple[int, bytes, bytes]:
        """The arguments of the replica's method, as of now."""
        left_ms = None if self.deadline is None else self.deadline.remaining_ms(time.monotonic())
        return PROTOCOL, self.image, encode_request(self.evaluations, left_ms, self.request)


class HandleVariants:
    """The server's access to the replicas: see `cascade_executor.Variants`."""

    def __init__(
        self,
        groups: Sequence[Group],
        handles: Sequence[DeploymentHandle],
        presence: PolledPresence | None = None,
    ) -> None:
        """Access to `groups` by their `handles`.

        With `presence`, a request to a group without live replicas fails; without, Serve's router lets it wait.
        """
        self._groups = {v.name: (g.name, handle) for g, handle in zip(groups, handles, strict=True) for v in g.variants}
        self._methods: dict[str, _Methods] = {}
        """By group, from the first call on: before, there may be no event loop, which Serve needs for this."""
        self._presence = presence

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[Part]:
        """See `cascade_executor.Variants.ask`.

        The members of a stage are all in one group, and stages that share a member are in the same group. The request
        is cancelled at its deadline, wherever it waits; a replica that dies before it answers is replaced by another
        once.

        Raises:
            NotReady: if there is no replica; Serve would wait for one without end.
        """
        by_group = groupby(evaluations, lambda evaluation: self._groups[next(iter(evaluation.wanted))])
        for (group, handle), of_group in by_group:
            methods = self._methods.get(group) or self._methods.setdefault(group, _methods(handle))
            call = _Call(group, methods, image, tuple(of_group), deadline, current_request())
            if not streaming:
                for part in await self._plain(call):
                    yield part
                continue
            async with aclosing(self._streamed(call)) as parts:
                async for part in parts:
                    yield part

    async def presence(self) -> tuple[Presence, ...]:
        """What a replica of each group says of itself."""
        handles = dict(self._groups.values())
        replies = await asyncio.gather(*(handle.present.remote(PROTOCOL) for handle in handles.values()))
        return tuple(map(decode_presence, replies))

    async def _plain(self, call: _Call) -> tuple[Part, ...]:
        for left in reversed(range(_TRIES)):
            self._check_live(call.group)
            response = call.methods[0].remote(*call.message())
            try:
                return decode_reply(await self._reply(call, response))
            except ReplicaGone:
                if not left:
                    raise
            except BaseException:
                response.cancel()  # does nothing once it has ended
                raise
        raise AssertionError("the last try returns or raises")

    async def _streamed(self, call: _Call) -> AsyncGenerator[Part]:
        for left in reversed(range(_TRIES)):
            replied = False
            self._check_live(call.group)
            stream = call.methods[1].remote(*call.message())
            try:
                while (reply := await self._reply(call, anext(stream, None))) is not None:
                    replied = True
                    for part in decode_reply(reply):
                        yield part
            except ReplicaGone:
                if replied or not left:
                    raise
            else:
                return
            finally:
                stream.cancel()  # does nothing once it has ended

    async def _reply(self, call: _Call, reply: Awaitable[AnswerT]) -> AnswerT:
        """A reply of a replica, by the deadline and while the group has one.

        Raises:
            HawkVisionError: Serve's errors in our terms.
        """
        try:
            async with asyncio.timeout_at(None if call.deadline is None else call.deadline.at) as timer:
                with self._watched(call.group, timer):
                    answer = await _translated(call.group, reply)
        except TimeoutError:
            if self._presence is not None and self._presence.is_absent(call.group):
                raise _no_replica(call.group, self._presence) from None
            raise DeadlineMissed(f"the deadline passed before {call.group!r} answered") from None
        if self._presence is not None:
            self._presence.record_reply(call.group)
        return answer

    def _check_live(self, group: str) -> None:
        """Send nothing to a group without replicas.

        Raises:
            NotReady: if it has none.
        """
        if self._presence is not None and self._presence.is_absent(group):
            raise _no_replica(group, self._presence)

    @contextmanager
    def _watched(self, group: str, timer: asyncio.Timeout) -> Iterator[None]:
        """Let the timer expire when the group has no replica any more."""
        if self._presence is None:
            yield
            return
        waiting = self._presence.waiting(group)
        waiting.add(timer)
        try:
            yield
        finally:
            waiting.discard(timer)


def _no_replica(group: str, presence: PolledPresence) -> NotReady:
    problem = presence.problem(group)
    return NotReady(f"{group!r} has no live replica" + (f": {problem}" if problem else ""))


async def _translated(group: str, reply: Awaitable[AnswerT]) -> AnswerT:
    """The reply of a replica of the group.

    Raises:
        HawkVisionError: Serve's errors in our terms.
    """
    try:
        return await reply
    except BackPressureError:
        raise Overloaded(f"the queue of {group!r} is full", _RETRY_AFTER_S) from None
    except (RayActorError, grpc.aio.AioRpcError) as error:
        raise ReplicaGone(f"a replica of {group!r} is gone: {type(error).__name__}") from None
    except DeploymentUnavailableError as error:
        raise NotReady(f"{group!r} has no live replica: {type(error).__name__}") from None
    except asyncio.CancelledError:
        # A replica that is stopped cancels its requests, and Serve raises here what was raised there.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ReplicaGone(f"a replica of {group!r} has stopped") from None
