"""The view *review* in a real Chromium: images are judged by keyboard and by touch, and certificates come of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Route, expect

from hawkvision.system.child_server import ServerProcess
from tests.browser import Tab, tab
from tests.edge.conftest import Caller, Reply
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
JUDGED = re.compile(r"(\d+) images? judged, (\d+) wait")


@pytest.fixture
def desk(browser: Browser, audited: ServerProcess, keys: dict[str, str]) -> Iterator[Tab]:
    """The view, signed in with a key that may review and no more."""
    with tab(browser, audited.url) as opened:
        opened.open("review")
        opened.sign_in(keys["review"])
        expect(opened.page.locator("#item .choices button").first).to_be_visible()
        yield opened


def judged(opened: Tab) -> int:
    """How many images have been judged, as the page says."""
    found = JUDGED.search(opened.page.locator("#progress").inner_text())
    assert found is not None
    return int(found[1])


def progress(opened: Tab) -> Locator:
    return opened.page.locator("#progress")


def known(node: ServerProcess, keys: dict[str, str]) -> Any:
    """What has a label, once the node has time to say so."""
    caller, found = Caller(node), list[Reply]()
    bearer = {"Authorization": f"Bearer {keys['review']}"}

    def answered() -> bool:
        found.append(caller.send("GET", "/v1/review?labelled=true", headers=bearer))
        return found[-1].status == 200

    wait_until(answered)
    caller.close()
    return found[-1].json


def test_an_image_is_judged_by_the_keyboard_and_taken_back(
    desk: Tab, audited: ServerProcess, keys: dict[str, str]
) -> None:
    before = judged(desk)
    expect(desk.page.locator("#item img")).to_have_js_property("complete", value=True)
    assert desk.page.locator("#item img").evaluate("(image) => image.naturalWidth") == 80
    for done, key in enumerate(("1", "2", "3", "0"), start=1):
        desk.page.keyboard.press(key)
        expect(progress(desk)).to_contain_text(f"{before + done} image")
    assert {each["label"] for each in known(audited, keys)["items"]} >= {"first", "second", "neither", "cannot_tell"}
    for left in (3, 2, 1, 0):
        desk.page.keyboard.press("u")
        expect(progress(desk)).to_contain_text(f"{before + left} image")
    expect(desk.page.locator("#undo")).to_be_disabled()
    assert known(audited, keys)["labelled"] == before


def test_what_was_judged_is_looked_at_again_and_changed(
    desk: Tab, audited: ServerProcess, keys: dict[str, str]
) -> None:
    before = judged(desk)
    desk.page.keyboard.press("1")
    expect(progress(desk)).to_contain_text(f"{before + 1} image")
    desk.page.locator("#again").check()
    expect(desk.page.locator("#item")).to_contain_text("It was judged: The first.")
    desk.page.keyboard.press("3")
    expect(desk.page.locator("#item .choices")).to_have_count(0)
    assert [each["label"] for each in known(audited, keys)["items"]] == ["neither"]
    desk.page.locator("#again").uncheck()
    expect(desk.page.locator("#item .choices")).to_have_count(1)
    desk.page.locator("#undo").click()
    expect(progress(desk)).to_contain_text(f"{before} image")


@pytest.mark.parametrize("status", [429, 503, None])
def test_the_view_asks_again_after_a_refusal_and_a_broken_connection(desk: Tab, status: int | None) -> None:
    broken: list[str] = []

    def refuse_once(route: Route) -> None:
        if broken:
            route.continue_()
            return
        broken.append(route.request.url)
        if status is None:
            route.abort()
        else:
            route.fulfill(status=status, json={"error": "busy", "code": "overloaded"}, headers={"Retry-After": "1"})

    desk.page.route("**/v1/review?**", refuse_once)
    desk.page.locator("#again").check()
    expect(desk.page.locator("#notice")).to_contain_text("Trying again.")
    desk.page.locator("#again").uncheck()
    expect(desk.page.locator("#item .choices")).to_have_count(1)
    expect(desk.page.locator("#notice")).to_be_empty()


def test_both_answers_are_shown_without_saying_whose_and_the_targets_beside_them(desk: Tab) -> None:
    assert desk.page.locator("#item .answers li").count() in (1, 2)
    text = desk.page.locator("#review").inner_text()
    assert not re.search(r"edge stage|reference stage|squeezenet", text)
    assert desk.page.locator("#gain li").count() > 5
    assert re.search(r"drop of 1 %: (not certifiable yet|certifiable)", text)
    assert "more of the images drawn at random" in text


def test_a_phone_judges_by_thumb(browser: Browser, audited: ServerProcess, keys: dict[str, str]) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with tab(browser, audited.url, **phone) as opened:
        opened.open("review")
        opened.sign_in(keys["review"])
        button = opened.page.get_by_role("button", name="Cannot tell")
        button.wait_for()
        box = button.bounding_box()
        assert box is not None
        assert box["height"] >= 44
        before = judged(opened)
        button.tap()
        expect(progress(opened)).to_contain_text(f"{before + 1} image")
        opened.page.locator("#undo").tap()
        expect(progress(opened)).to_contain_text(f"{before} image")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_who_may_only_review_is_told_what_renewing_needs(desk: Tab) -> None:
    desk.page.on("dialog", lambda dialog: dialog.accept())
    desk.page.locator("#certify").click()
    expect(desk.page.locator("#notice")).to_contain_text("This needs a key with the scope operate.")


@pytest.mark.parametrize("scope", ["infer", "observe", "operate"])
def test_a_key_without_the_right_is_told_which_it_needs(
    browser: Browser, audited: ServerProcess, keys: dict[str, str], scope: str
) -> None:
    with tab(browser, audited.url) as opened:
        opened.open("review")
        expect(opened.page.locator("#notice")).to_contain_text("a key with the scope review")
        opened.sign_in(keys[scope])
        expect(opened.page.locator("#notice")).to_contain_text(f"may {scope}; this needs a key that may review")
        assert opened.page.locator("#item img").count() == 0


def test_two_people_get_different_images(browser: Browser, audited: ServerProcess, keys: dict[str, str]) -> None:
    shown: list[set[str]] = []
    for _ in range(2):
        with tab(browser, audited.url) as opened:
            opened.open("review")
            with opened.page.expect_response(lambda reply: "reviewer=" in reply.url) as listed:
                opened.sign_in(keys["review"])
            shown.append({item["id"] for item in listed.value.json()["items"]})
    assert shown[0]
    assert not shown[0] & shown[1]


def test_a_node_without_audits_says_so(browser: Browser, node: ServerProcess) -> None:
    with tab(browser, node.url) as opened:
        opened.open("review")
        expect(opened.page.locator("#item")).to_contain_text("No audits yet")
