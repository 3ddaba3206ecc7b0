"""Pages of other origins may ask a server from a browser, where a setting allows it (the Fetch standard's CORS).

Starlette's middleware decides; here is what it is told, and a `Vary` on every response of a server that answers origins
differently, so that no cache gives one origin what another was answered. Keys are in a header that pages set
themselves, so credentials in the standard's sense (cookies) are not allowed. What is refused below the application
(a head that is no HTTP, too large or late) says nothing to pages, for its origin is not known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hawkvision.core.errors import ConfigError

ANY: Final = "*"
EXPOSED: Final = (
    "allow",
    "inference-header-content-length",
    "retry-after",
    "server-timing",
    "traceparent",
    "www-authenticate",
    "x-request-id",
)
"""Response headers that pages may read, besides those that they always may."""
PREFLIGHT_S: Final = 600
"""How long a browser need not ask again; some take no longer times."""

_ORIGIN: Final = re.compile(r"null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?").fullmatch
"""As browsers write it: lower case, no path, no user, and no port that the scheme implies."""


def check_origins(setting: str, origins: Sequence[str]) -> None:
    """Refuse what no browser sends.

    Raises:
        ConfigError: naming the setting and the origin.
    """
    for origin in origins:
        if origin != ANY and not _ORIGIN(origin):
            raise ConfigError(
                f"{setting}: {origin!r} is no origin; expected {ANY} or SCHEME://HOST[:PORT] as browsers send it, in "
                "lower case and without a path"
            )
        if (origin.partition(":")[0], origin.rpartition(":")[2]) in (("http", "80"), ("https", "443")):
            raise ConfigError(f"{setting}: {origin!r}: browsers leave out the port that the scheme implies")
    if ANY in origins and len(origins) > 1:
        raise ConfigError(f"{setting}: {ANY} allows every origin; expected it alone")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, answering pages of these origins (`*`: of all), pre-flight requests included."""
    inner = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
        allow_headers=(ANY,),
        allow_private_network=True,
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).add_vary_header("Origin")
            await send(message)

        await inner(scope, receive, say)

    return answer
