"""The page as a whole: who gets it, what other sites may do, and how it is to read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from edge.page.files import HEADERS
from hawkvision.core.errors import Forbidden
from hawkvision.servers.browsers import Browsers
from hawkvision.servers.keys import PAGE_FILES
from hawkvision.system.child_server import ServerProcess, running
from tests.browser import tab
from tests.edge.conftest import Caller, Reply
from tests.images import encoded

pytestmark = pytest.mark.slow
STATIC = Path(__file__).resolve().parents[3] / "edge" / "page" / "static"


def sent(node: ServerProcess, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> Reply:
    caller = Caller(node)
    try:
        return caller.send(method, path, body, dict(headers))
    finally:
        caller.close()


@pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in PAGE_FILES)])
def test_the_files_come_without_a_key_and_with_a_policy_that_allows_nothing_from_elsewhere(
    keyed: ServerProcess, name: str
) -> None:
    reply = sent(keyed, "GET", f"/{name}", {})
    assert reply.status == 200
    assert reply.headers["content-security-policy"] == HEADERS["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert "set-cookie" not in reply.headers
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_every_file_is_listed_and_none_has_markup_that_runs_or_an_address_elsewhere() -> None:
    assert {path.name for path in STATIC.iterdir()} == {"index.html", *PAGE_FILES}
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[a-z]|innerHTML|outerHTML|insertAdjacentHTML|\beval\(| style=| on[a-z]+=", text)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example"]
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/v1/tasks"), ("POST", "/v1/infer"), ("GET", "/metrics")]
)
def test_another_hosts_name_is_refused(node: ServerProcess, host: str, method: str, path: str) -> None:
    reply = sent(node, method, path, {"Host": host}, encoded() if method == "POST" else None)
    assert reply.status == 403
    assert host in reply.json["error"]
    assert "`hosts`" in reply.json["error"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8080", "node.localhost", "192.168.1.7"])
def test_own_names_and_addresses_are_taken(node: ServerProcess, host: str) -> None:
    assert sent(node, "GET", "/v1/tasks", {"Host": host}).status == 200


def test_a_further_name_is_taken_where_the_operator_says_so() -> None:
    with running("edge", "--port", "0", "--backend", "noop", "--hosts", "edge-7.site.example") as named:
        assert sent(named, "GET", "/", {"Host": "Edge-7.site.example:80"}).status == 200
        assert sent(named, "GET", "/", {"Host": "edge-8.site.example"}).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/infer"),
        ("GET", "/v1/review"),
        ("POST", "/v1/review/1"),
        ("DELETE", "/v1/review/1"),
        ("POST", "/v1/certificates"),
    ],
)
def test_no_other_sites_request_acts(node: ServerProcess, method: str, path: str, headers: dict[str, str]) -> None:
    reply = sent(node, method, path, headers, encoded() if method == "POST" else None)
    assert reply.status == 403
    assert "cors_origins" in reply.json["error"]


def test_a_listed_origin_may_call_and_others_may_not() -> None:
    rules = Browsers(origins=("https://shop.example",))
    host = (b"host", b"127.0.0.1:8080")
    rules.check([host, (b"origin", b"https://shop.example"), (b"sec-fetch-site", b"cross-site")])
    rules.check([host, (b"origin", b"http://127.0.0.1:8080"), (b"sec-fetch-site", b"same-origin")])
    Browsers(origins=("*",)).check([host, (b"origin", b"https://any.example"), (b"sec-fetch-site", b"cross-site")])
    for origin in (b"https://shop.example.evil", b"http://shop.example", b"https://shop.example:444"):
        with pytest.raises(Forbidden):
            rules.check([host, (b"origin", origin)])
    with pytest.raises(Forbidden):
        rules.check([host, (b"sec-fetch-site", b"cross-site")])


def test_an_operator_can_switch_the_page_off() -> None:
    with running("edge", "--port", "0", "--backend", "noop", "--page", "false") as plain:
        assert sent(plain, "GET", "/", {}).status == 404
        assert sent(plain, "GET", "/page/app.js", {}).status == 404
        assert sent(plain, "GET", "/v1/tasks", {}).status == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1920])
def test_axe_finds_nothing_serious_in_any_view(
    browser: Browser, node: ServerProcess, photograph: Path, scheme: str, width: int
) -> None:
    with tab(browser, node.url, color_scheme=scheme, viewport={"width": width, "height": 900}) as opened:
        for view in ("try", "live", "review"):
            opened.open(view)
            if view == "try":
                opened.page.set_input_files("#file", photograph)
                opened.page.locator("#answer .badge").first.wait_for()
            found = Axe().run(opened.page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_views_are_reached_by_the_keyboard_alone(browser: Browser, node: ServerProcess) -> None:
    with tab(browser, node.url) as opened:
        opened.page.goto(node.url)
        expect(opened.page.locator("#try")).to_be_visible()
        opened.page.keyboard.press("Tab")
        opened.page.keyboard.press("Tab")
        opened.page.keyboard.press("Enter")
        opened.page.locator("#live").wait_for()
        expect(opened.page.locator("nav a[aria-current]")).to_have_text("Live")
        opened.page.locator("#sign-in summary").press("Enter")
        opened.page.keyboard.press("Tab")
        opened.page.keyboard.type("a key")
        expect(opened.page.locator("#key")).to_have_value("a key")
