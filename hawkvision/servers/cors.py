"""Cross-origin requests from browsers (CORS), where a setting allows them.

Starlette's middleware decides. This module configures it and adds `Vary: Origin` to every response, so that no cache
serves one origin's response to another. Pages set keys in a header themselves, so credentials in the sense of the Fetch
standard (cookies) are not allowed. Requests that are refused below the application (malformed, too large or late heads)
have no CORS headers, because their origin is not known.
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
"""Response headers that pages may read, beyond the safe-listed ones."""
PREFLIGHT_S: Final = 600
"""How long a browser may cache a pre-flight response."""

_ORIGIN: Final = re.compile(r"null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?").fullmatch
"""An origin as browsers write it: lower case, no path, no user, no default port."""


def check_origins(setting: str, origins: Sequence[str]) -> None:
    """Refuse origins that no browser sends.

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
    """Wrap an application to answer pages of these origins (`*` for all), pre-flight requests included."""
    inner = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE", "OPTIONS"),
        allow_headers=(ANY,),
        allow_private_network=True,
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def add_vary(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).add_vary_header("Origin")
            await send(message)

        await inner(scope, receive, add_vary)

    return answer
