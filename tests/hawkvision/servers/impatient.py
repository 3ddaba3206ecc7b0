"""The HTTP protocol with short limits in front of a small application, for tests that wait for them.

    python -m tests.hawkvision.servers.impatient [HOST [CERTIFICATE KEY]]

`/upload` reads the body as the servers of both tiers do and answers with the refusal if it does not come on, `/early`
answers before the body has come, `/medium` and `/large` with more than is written at once, `/open` with the number of
open connections, the rest with the size of the body.
"""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from hawkvision.core.errors import HawkVisionError
from hawkvision.servers.bodies import Bodies, Body, CallerGone, UploadPace
from hawkvision.servers.connections import Limits
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.protocol import bounded
from hawkvision.servers.tls import Certificates

PER_ADDRESS = 8
LIMITS = Limits(connections=64, per_address=PER_ADDRESS, head_s=0.5, drain_s=0.5, leave_s=0.5, unread_s=0.5)
BODIES = Bodies(3_000_000, UploadPace(step_s=0.5, step_bytes=1000))

SIZES = {"/medium": 8 << 20, "/large": 16 << 20}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/upload":
        await upload(receive, send)
        return
    body, more = b"", scope["path"] not in ("/early", *SIZES)
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    number = len(SERVER.server_state.connections) if scope["path"] == "/open" else len(body)
    answer = bytes(SIZES[scope["path"]]) if scope["path"] in SIZES else b"%d" % number
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def upload(receive: Receive, send: Send) -> None:
    body = Body(BODIES, receive)
    try:
        status, answer = 200, b"%d" % len(await body.read(None))
    except CallerGone:
        return
    except HawkVisionError as error:
        status, answer = error.status, error.message.encode()
    finally:
        body.release()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


PROTOCOL = bounded(LIMITS)
TLS = __name__ == "__main__" and len(sys.argv) == 4
if TLS:
    CERTIFICATE, KEY = map(Path, sys.argv[2:])
    PROTOCOL = behind_tls(PROTOCOL, Certificates("tls_", CERTIFICATE, KEY, server=True))
SERVER = uvicorn.Server(
    uvicorn.Config(app, http=PROTOCOL, ws="none", lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
)


async def serve() -> None:
    host = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    with socket.create_server((host, 0)) as listener:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(SERVER, "should_exit", True))
        print(f"ready: {'https' if TLS else 'http'}://{host}:{listener.getsockname()[1]}", flush=True)
        await SERVER._serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(serve())
