"""The replica's end of the local socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

from hawkvision.core.errors import DeadlineMissed, HawkVisionError, Overloaded, RequestError
from hawkvision.core.logs import resume
from hawkvision.datacenter.local_socket.protocol import (
    PING_NUMBER,
    Address,
    Failure,
    FrameProtocol,
    Part,
    RegistrationFrame,
    ReplicaRequest,
    SocketPing,
)

log = logging.getLogger("hawkvision.datacenter")

RequestHandler: TypeAlias = Callable[[ReplicaRequest], AsyncGenerator[Part]]
"""Yields the parts of an answer, or raises."""


async def register(address: Address, group: str, statement: str, handler: RequestHandler) -> Registration:
    """Register a replica of this group with the server, and answer its requests from now on.

    The server bounds how many requests run at once.

    Raises:
        OSError: if no server listens there.
    """
    loop, connected = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
    connected.setblocking(False)
    try:
        await loop.sock_connect(connected, address.name)
        _, connection = await loop.create_unix_connection(
            lambda: _ReplicaEnd(handler, address.key, RegistrationFrame(group, statement)), sock=connected
        )
    except BaseException:
        connected.close()
        raise
    return Registration(connection)


class Registration:
    """A replica's registration, valid while the server lives. Made by `register`."""

    def __init__(self, connection: _ReplicaEnd) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        """Whether the server is gone."""
        return self._connection.closed

    def close(self) -> None:
        """End the registration; the server uses other replicas."""
        self._connection.close()


class _ReplicaEnd(FrameProtocol):
    def __init__(self, handler: RequestHandler, key: bytes, registration: RegistrationFrame) -> None:
        super().__init__()
        self._handler = handler
        self._key = key
        self._registration = registration
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._transport is not None and not self.closed:
            self._transport.write(self._key)
            self.send(PING_NUMBER, self._registration)

    def frame(self, number: int, body: Any) -> None:
        if isinstance(body, ReplicaRequest):
            self._tasks[number] = asyncio.create_task(self._answer(number, body))
            self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number))
        elif isinstance(body, SocketPing):
            self.send(number, body)
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, request: ReplicaRequest) -> None:
        end: HawkVisionError | Failure | None = None
        resume(request.request)
        try:
            async with aclosing(self._handler(request)) as parts:
                async for part in parts:
                    self.send(number, part)
        except (RequestError, DeadlineMissed, Overloaded) as error:
            end = error
        except HawkVisionError as error:
            log.exception("an image could not be evaluated")
            end = error
        except Exception as error:
            log.exception("an image could not be evaluated")
            end = Failure(f"{type(error).__name__}: {error}")
        self.send(number, end)

    def connection_lost(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
