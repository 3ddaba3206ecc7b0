"""Serves the files of the page: plain HTML, CSS and JavaScript modules, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from hawkvision.servers.browsers import Browsers
from hawkvision.servers.keys import PAGE_FILES

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Keys are typed into this page, so it loads nothing from elsewhere and cannot be framed."""

_FOLDER: Final = Path(__file__).parent / "static"


def routes(browsers: Browsers) -> list[Route]:
    """The page at `/`, and its files at `/page/`; other hosts' names are refused."""

    def serve(name: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            browsers.check_host(request.headers.get("host", "").encode("latin-1"))
            return FileResponse(_FOLDER / name, headers=HEADERS)

        return answer

    files = [Route(f"/page/{name}", serve(name), methods=["GET"]) for name in PAGE_FILES]
    return [Route("/", serve("index.html"), methods=["GET"]), *files]
