"""The view *live* in a real Chromium: what the node does appears, with its guarantees, and goes on after a restart."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from hawkvision.system.child_server import ServerProcess, running
from tests.browser import Tab, tab
from tests.edge.conftest import Caller
from tests.edge.page.conftest import EDGE
from tests.edge.peer import Peer
from tests.images import encoded

pytestmark = pytest.mark.slow
VISIBILITY = """(state) => {
  Object.defineProperty(document, "hidden", { get: () => state === "hidden", configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def infer(node: ServerProcess, query: str = "", times: int = 1, key: str = "") -> None:
    caller = Caller(node)
    try:
        for _ in range(times):
            bearer = {"Authorization": f"Bearer {key}"} if key else {}
            assert caller.send("POST", f"/v1/infer?{query}", encoded(), bearer).status == 200
    finally:
        caller.close()


def tile(opened: Tab, name: str) -> str:
    return opened.page.locator(".tile", has_text=name).locator("b").inner_text()


def test_what_the_node_answers_appears_without_asking_again(browser: Browser, node: ServerProcess) -> None:
    with tab(browser, node.url) as opened:
        opened.open("live")
        expect(opened.page.locator("#tasks")).to_contain_text("imagenet")
        infer(node, "stream=door", times=5)
        expect(opened.page.locator("#answers tbody tr")).to_have_count(5)
        expect(opened.page.locator("#answers")).to_contain_text("(datacenter)")
        expect(opened.page.locator("#guarantees")).to_contain_text("all traffic")
        assert tile(opened, "escalated") == "100 %"
        assert tile(opened, "datacenter") == "answers"
        assert tile(opened, "memory").endswith("MB")
        assert opened.page.locator("#chart polyline").count() == 2
        expect(opened.page.locator("#alarms")).to_have_text("No alarm.")
        assert opened.page.locator("#answers img").count() == 0, "this node keeps no images"


def test_the_stream_carries_the_key_and_images_of_answers_need_the_right_to_review(
    browser: Browser, audited: ServerProcess, keys: dict[str, str]
) -> None:
    with tab(browser, audited.url) as opened:
        opened.open("live")
        expect(opened.page.locator("#notice")).to_contain_text("a key with the scope observe")
        opened.sign_in(keys["infer"])
        expect(opened.page.locator("#notice")).to_contain_text("may infer; this needs a key that may observe")
        opened.sign_in(keys["observe"])
        expect(opened.page.locator("#tasks")).to_contain_text("imagenet")
        infer(audited, key=keys["infer"])
        expect(opened.page.locator("#answers img").first).to_be_attached()
        expect(opened.page.locator("#answers img").first).to_be_hidden()


def test_a_suspended_guarantee_is_shown_with_its_alarm_and_in_the_next_answer(
    browser: Browser, tier: Peer, photograph: Path, tmp_path: Path
) -> None:
    command = [
        "edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", tier.url,
        "--audit-share", "0.2", "--state-file", str(tmp_path / "state"),
    ]  # fmt: skip
    with running(*command) as doubtful, tab(browser, doubtful.url) as opened:
        opened.open("live")
        expect(opened.page.locator("#guarantees")).to_contain_text("Certified")
        infer(doubtful, "quality=fast", times=500)
        expect(opened.page.locator("#guarantees")).to_contain_text("Suspended")
        expect(opened.page.locator("#alarms tbody")).to_contain_text("stands")
        opened.page.get_by_role("link", name="Try").click()
        opened.page.locator("#try").wait_for()
        opened.page.set_input_files("#file", photograph)
        expect(opened.page.locator("#answer")).to_contain_text("The guarantee is suspended")
        expect(opened.page.locator("#answer .badge").first).to_contain_text("Suspended")
        expect(opened.page.locator("#answer details")).to_contain_text(
            "audits show that the traffic is not as certified"
        )


def test_a_tab_that_nobody_sees_takes_no_connection(browser: Browser, node: ServerProcess) -> None:
    with tab(browser, node.url) as opened:
        opened.open("live")
        expect(opened.page.locator("#tasks")).to_contain_text("imagenet")
        with opened.page.expect_event("requestfailed"):
            opened.page.evaluate(VISIBILITY, "hidden")
        expect(opened.page.locator("#notice")).to_be_empty()
        with opened.page.expect_request("**/v1/status?**"):
            opened.page.evaluate(VISIBILITY, "visible")


def test_the_view_goes_on_when_the_node_comes_back(browser: Browser) -> None:
    command = ("edge", "--backend", "noop", "--port")
    with contextlib.ExitStack() as first:
        short = first.enter_context(running(*command, "0"))
        with tab(browser, short.url) as opened:
            opened.open("live")
            expect(opened.page.locator("#tasks")).to_contain_text("imagenet")
            first.close()
            expect(opened.page.locator("#tiles")).to_contain_text("Not connected")
            with running(*command, str(short.port)):
                expect(opened.page.locator("#tiles .tile").first).to_be_visible()
                expect(opened.page.locator("#notice")).to_be_empty()
