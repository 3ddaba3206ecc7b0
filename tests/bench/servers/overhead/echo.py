"""`python -m tests.bench.servers.overhead.echo`: a Starlette server that only receives a body and says how long it was.

What the web framework costs by itself, with the settings that the edge node runs under. It prints `ready: URL`.
"""

from __future__ import annotations

import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def echo(request: Request) -> JSONResponse:
    """The length of the body."""
    return JSONResponse({"bytes": len(await request.body())})


def main() -> int:
    """Serve on loopback until told to stop."""
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", ws="none", lifespan="off", access_log=False, log_level="warning",
        server_header=False, date_header=False,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
