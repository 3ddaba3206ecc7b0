"""An HTTP server that says what a test wants, byte for byte, and notes what it was asked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class RecordedRequest:
    """One request."""

    connection: int
    line: str
    head: str
    body: bytes

    @property
    def sends(self) -> bool:
        """Whether it brings an image."""
        return self.line.startswith("POST ")


Say = Callable[[RecordedRequest], Awaitable[bytes | None]]
"""The reply to a request; None closes the connection."""


@dataclass
class Scripted:
    """A running server."""

    url: str = ""
    asked: list[RecordedRequest] = field(default_factory=list)
    at_once: int = 0
    """Most requests that were being answered at one time."""
    answering: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller hangs up that has sent an image."""


def reply(body: bytes, status: int = 200, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def scripted(say: Say) -> AsyncIterator[Scripted]:
    """A server on loopback."""
    server = Scripted()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        sent = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                text = head.decode()
                asked = RecordedRequest(number, text.partition("\r\n")[0], text, body)
                sent = sent or asked.sends
                server.asked.append(asked)
                server.answering += 1
                server.at_once = max(server.at_once, server.answering)
                said = await say(asked)
                server.answering -= 1
                if said is None:
                    return
                writer.write(said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if sent:
                server.left.set()
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve(reader, writer, len(tasks))))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
