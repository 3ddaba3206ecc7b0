"""A real Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

WITHIN_MS: Final = 30_000


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Used on one thread, which then has an event loop until the block ends."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page of a node, and what it did."""

    page: Page
    base: str
    errors: list[str] = field(default_factory=list)
    """Exceptions, and what a content security policy refused."""
    elsewhere: list[str] = field(default_factory=list)
    """Requests to another host than the node."""

    def open(self, view: str = "try") -> None:
        """Open the page at a view."""
        self.page.goto(f"{self.base}/#{view}")
        self.page.locator(f"#{view}").wait_for()

    def sign_in(self, key: str) -> None:
        """Enter a key by the keyboard."""
        # The page opens the form itself when the node asks for a key, perhaps in between; a click might close it again.
        self.page.locator("#sign-in").evaluate("(form) => { form.open = true; }")
        self.page.locator("#key").press_sequentially(key)
        self.page.locator("#key").press("Enter")


@contextlib.contextmanager
def tab(browser: Browser, base: str, **context: Any) -> Iterator[Tab]:
    """A tab with a context of its own, which fails the test if it asked another host or a script failed."""
    session = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    session.set_default_timeout(WITHIN_MS)
    opened = Tab(session.new_page(), base)

    def route(sent: Route) -> None:
        url = urlsplit(sent.request.url)
        if url.scheme in ("blob", "data") or f"{url.scheme}://{url.netloc}" == base:
            sent.continue_()
        else:
            opened.elsewhere.append(sent.request.url)
            sent.abort()

    def on_error(error: object) -> None:
        opened.errors.append(str(error))

    def on_console(said: ConsoleMessage) -> None:
        if "Content Security Policy" in said.text:
            on_error(said.text)

    session.route("**/*", route)
    opened.page.on("pageerror", on_error)
    opened.page.on("console", on_console)
    try:
        yield opened
        assert not opened.errors
        assert not opened.elsewhere
    finally:
        session.close()
