"""`python -m tests.bench.servers.overhead.echo starlette|fastapi|raw`: servers that only receive a body and say how
long it was.

What the web framework costs by itself, with the settings the edge node runs under; `raw` is no framework at all but a
loop over one blocking socket, the floor of any client that measures against it. Each prints `ready: URL`.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from typing import Final

import uvicorn
from starlette.types import ASGIApp

KINDS: Final = ("starlette", "fastapi", "raw")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def main() -> int:
    """Serve on loopback until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.servers.overhead.echo", description=main.__doc__)
    parser.add_argument("kind", choices=KINDS)
    kind: str = parser.parse_args().kind
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        if kind == "raw":
            serve_raw(listener)
        else:
            app = starlette_app() if kind == "starlette" else fastapi_app()
            config = uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                date_header=False,
            )
            uvicorn.Server(config).run(sockets=[listener])
    return 0


def starlette_app() -> ASGIApp:
    """One POST route on Starlette."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse({"bytes": len(await request.body())})

    return Starlette(routes=[Route("/echo", echo, methods=["POST"])])


def fastapi_app() -> ASGIApp:
    """The same on FastAPI, which is no dependency of ours but what many would use instead."""
    import fastapi

    app: ASGIApp = (api := fastapi.FastAPI())

    # Annotated by assignment, because FastAPI reads annotations from the module's own names.
    async def echo(request: object) -> dict[str, int]:
        return {"bytes": len(await request.body())}  # type: ignore[attr-defined]

    echo.__annotations__ = {"request": fastapi.Request, "return": dict[str, int]}
    api.post("/echo")(echo)
    return app


def serve_raw(listener: socket.socket) -> None:
    """One connection after another, one request at a time."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := _receive(connection):
                body = b'{"bytes":%d}' % request
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _receive(connection: socket.socket) -> int:
    """The length of one request's body; 0 when the caller hangs up."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        chunk = connection.recv(65536)
        if not chunk:
            return 0
        received += chunk
    length = _LENGTH.search(received, 0, end + 2)
    expected = int(length[1]) if length else 0
    missing = expected - (len(received) - end - 4)
    while missing > 0:
        chunk = connection.recv(min(missing, 65536))
        if not chunk:
            return 0
        missing -= len(chunk)
    return expected


if __name__ == "__main__":
    sys.exit(main())
