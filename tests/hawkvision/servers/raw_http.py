"""Requests written byte by byte, and the replies to them."""

from __future__ import annotations

import socket
from contextlib import closing

from hawkvision.system.child_server import ServerProcess
from tests.edge.conftest import Caller, Reply

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
KEY = "a-key-of-the-node"
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n",
    "TLS": b"Upgrade: TLS/1.2, TLS/1.0\r\nConnection: Upgrade\r\n",
}


def connect(server: ServerProcess, sends: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(sends)
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """Everything the server still says; a reset counts as a close."""
    said = b""
    try:
        while piece := connection.recv(1 << 20):
            said += piece
    except ConnectionError:
        pass
    return said


def answer(connection: socket.socket) -> int:
    """The status of one answer on a connection that stays open, read to its end."""
    said = b""
    while not (found := replies(said)) or len(found[0].body) < int(found[0].headers.get("content-length", "1")):
        said += connection.recv(65536)
    return found[0].status


def replies(said: bytes) -> list[Reply]:
    """Several answers that came one after the other."""
    found = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", "0"))
        found.append(Reply(int(status.split()[1]), headers, rest[:size]))
        said = rest[size:]
    return found


def ask(server: ServerProcess, sends: bytes) -> list[Reply]:
    with connect(server, sends) as connection:
        return replies(until_closed(connection))


def flood(connection: socket.socket, mebibytes: int) -> None:
    """Send as much as the server takes."""
    block = b"a" * (1 << 20)
    try:
        for _ in range(mebibytes):
            connection.sendall(block)
    except ConnectionError:
        pass


def healthy(server: ServerProcess) -> bool:
    with closing(Caller(server)) as caller:
        return caller.get("/healthz").status == 200


def refusal(found: list[Reply]) -> tuple[int, str]:
    """Status and code of the only answer, which must be in the documented form."""
    (only,) = found
    assert only.headers["content-type"] == "application/json"
    assert only.headers["connection"] == "close"
    assert set(only.json) == {"error", "code"}
    return only.status, only.json["code"]
