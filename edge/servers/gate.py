"""Refuses a request that would be late at the end of its head, before the server starts anything for it.

What a busy node cannot answer must cost it next to nothing. A request that may come in has a place in the pool from the
end of its body on, so that what waits on the event loop is counted as well. Forms, browsers' requests and the other
protocols are left to `edge.servers.http`, which asks the pool itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from edge.inference.job_queue import Place
from edge.monitoring.stream_keys import caller_of
from edge.servers.shared.frontend import Frontend
from edge.servers.shared.http_messages import encode, error_headers, name_request
from edge.servers.shared.request_fields import read_request
from hawkvision.core.errors import HawkVisionError, Overloaded
from hawkvision.tasks.registry import INFER_PATH, KIND_OF_FORM

LOCAL: Final = "127.0.0.1"
"""The address of callers without one, which connect over a Unix socket."""
_PLAIN: Final = (b"image/", b"application/octet-stream")


class Gate:
    """The gate of one node's HTTP server."""

    def __init__(self, frontend: Frontend) -> None:
        self._front = frontend

    def admit(
        self, url: bytes, headers: list[tuple[bytes, bytes]], client: tuple[str, int] | None, waited_s: float
    ) -> bytes | Callable[[], Place] | None:
        """See `hawkvision.servers.protocol.Gate`."""
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        kind = KIND_OF_FORM.get(path)
        if kind is None and path != INFER_PATH:
            return None
        authorization, ours = None, []
        for entry in headers:
            name = entry[0]
            if name == b"authorization":
                authorization = entry[1].decode("latin-1")
            elif name.startswith(b"x-hawkvision-"):
                ours.append(entry)
            elif name in (b"origin", b"expect") or (name == b"content-type" and not entry[1].startswith(_PLAIN)):
                return None
        front = self._front
        try:
            tasks, asked = front.ready_tasks(), read_request(query, tuple(ours))
            node = tasks.node(asked.task, kind or asked.kind)
            key = front.keys.caller_of(authorization)
            if key is None or node.may_ask_datacenter(asked):
                return None
            caller = caller_of(key.name, client[0] if client else LOCAL)
            until = asked.promised(front.clock.now() - waited_s)
            node.pool.check(caller, until)
            return partial(node.pool.reserve, caller, until)
        except Overloaded as error:
            return self._refused(error, node.task, headers)
        except HawkVisionError:
            return None

    def _refused(self, error: Overloaded, task: str, headers: list[tuple[bytes, bytes]]) -> bytes:
        _, named = name_request(headers)
        body = encode(self._front.refusal(error, task).body())
        lines = [
            b"HTTP/1.1 429 Too Many Requests",
            b"content-type: application/json",
            b"content-length: %d" % len(body),
        ]
        lines += [b"%b: %b" % each for each in (*named, *error_headers(error))]
        return b"\r\n".join((*lines, b"", body))
