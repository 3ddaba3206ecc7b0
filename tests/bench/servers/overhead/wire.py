"""The lightest HTTP client that is still one: a kept-alive blocking socket, request bytes made beforehand.

It knows just enough of HTTP/1.1 to find the end of a reply: a status line, a Content-Length, a body. What it costs
itself is measured against `python -m tests.bench.servers.overhead.echo raw` and stated beside every table.
"""

from __future__ import annotations

import re
import socket
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 10.0
MAX_HEAD_BYTES: Final = 64 * 1024
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class WireClientError(Exception):
    """The server refused, or sent what this client does not read."""


class WireClient:
    """One connection that sends the same POST again and again."""

    def __init__(self, url: str, path: str, body: bytes, headers: str = "Content-Type: image/jpeg\r\n") -> None:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._request = (
            b"POST %s HTTP/1.1\r\nHost: %s:%d\r\n%sContent-Length: %d\r\n\r\n"
            % (path.encode(), host.encode(), port, headers.encode(), len(body))
        ) + body
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self) -> bytes:
        """Send the request and give the body of the reply.

        Raises:
            WireError: for any status but 200, and for a reply without Content-Length.
            OSError: if the connection breaks or is silent for `TIMEOUT_S`.
        """
        self._socket.sendall(self._request)
        received = self._socket.recv(65536)
        while (end := received.find(b"\r\n\r\n")) < 0:
            if len(received) > MAX_HEAD_BYTES:
                raise WireClientError(f"more than {MAX_HEAD_BYTES} bytes of headers")
            received += self._more()
        length = _LENGTH.search(received, 0, end + 2)
        if length is None:
            raise WireClientError(f"no Content-Length in {received[:end]!r}")
        whole = end + 4 + int(length[1])
        while len(received) < whole:
            received += self._more()
        if not received.startswith(b"HTTP/1.1 200"):
            raise WireClientError(received[:300].decode(errors="replace"))
        return received[end + 4 : whole]

    def _more(self) -> bytes:
        chunk = self._socket.recv(65536)
        if not chunk:
            raise WireClientError("the server closed the connection in the middle of a reply")
        return chunk

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> WireClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
