"""The view *try* in a real Chromium: a person's paths with an image, by mouse, keyboard and touch."""

from __future__ import annotations

import base64
import contextlib
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from hawkvision.models.manifest import artifact_path, cache_dir
from hawkvision.system.child_server import ServerProcess, running
from tests.browser import Tab, tab
from tests.edge.peer import Peer
from tests.images import encoded

pytestmark = pytest.mark.slow
PASTE = """([name, type, body, event]) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(body), (each) => each.charCodeAt(0))], name, { type }));
  const sent = event === "drop" ? new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true })
    : new ClipboardEvent("paste", { clipboardData: files, bubbles: true });
  document.body.dispatchEvent(sent);
}"""


def answered(opened: Tab) -> str:
    """The answer's text, once there is a badge."""
    opened.page.locator("#answer .badge").first.wait_for()
    return opened.page.locator("#answer").inner_text()


def test_an_image_is_chosen_and_the_answer_says_who_why_and_what_is_guaranteed(
    browser: Browser, node: ServerProcess, tier: Peer, photograph: Path
) -> None:
    with tab(browser, node.url) as opened:
        opened.open()
        opened.page.set_input_files("#file", photograph)
        said = answered(opened)
        assert re.search(r"The edge scored [\d.]+ %, this target needs", said)
        assert "the datacenter answered in" in said
        assert opened.page.locator("#answer .bars li").count() == len(tier.top_k)
        assert "Nothing is promised for this answer" in said
        assert "datacenter" in opened.page.locator("#time .legend").inner_text()
        expect(opened.page.locator("#shown")).to_have_attribute("alt", photograph.name)


def test_the_slider_offers_the_targets_and_its_choice_is_asked_for_and_shown_as_code(
    browser: Browser, node: ServerProcess, photograph: Path
) -> None:
    with tab(browser, node.url) as opened:
        opened.open()
        opened.page.set_input_files("#file", photograph)
        answered(opened)
        slider = opened.page.locator("#target")
        with opened.page.expect_request("**/v1/infer**") as asked:
            slider.press("End")
        assert "quality=fast" in asked.value.url
        assert "always the edge" in opened.page.locator("#wanted").inner_text()
        assert "Escalates 0 %" in opened.page.locator("#cost").inner_text()
        expect(opened.page.locator("#answer")).to_contain_text("it answered in")
        opened.page.locator("#deadline").fill("250")
        with opened.page.expect_request("**/v1/infer**") as asked:
            opened.page.locator("#deadline").press("Enter")
        assert "deadline_ms=250" in asked.value.url
        curl, python = opened.page.locator("#same pre").all_inner_texts()
        assert "quality=fast&deadline_ms=250" in curl
        assert 'quality="fast", deadline_ms=250' in python


@pytest.mark.parametrize("event", ["paste", "drop"])
def test_an_image_is_pasted_or_dropped(browser: Browser, node: ServerProcess, event: str) -> None:
    with tab(browser, node.url) as opened:
        opened.open()
        expect(opened.page.locator("#task option")).not_to_have_count(0)
        opened.page.evaluate(PASTE, ["a.jpg", "image/jpeg", base64.b64encode(encoded()).decode(), event])
        answered(opened)


def test_on_a_phone_an_image_is_chosen_by_touch(browser: Browser, node: ServerProcess, photograph: Path) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with tab(browser, node.url, **phone) as opened:
        opened.open()
        with opened.page.expect_file_chooser() as chooser:
            opened.page.get_by_text("Take a photograph").tap()
        chooser.value.set_files(photograph)
        answered(opened)
        wide = opened.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360
        opened.page.locator("#ask").tap()
        answered(opened)


def test_what_is_no_image_gets_the_nodes_own_error_and_the_next_image_an_answer(
    browser: Browser, node: ServerProcess, photograph: Path, tmp_path: Path
) -> None:
    text = tmp_path / "notes.jpg"
    text.write_text("no image")
    with tab(browser, node.url) as opened:
        opened.open()
        opened.page.set_input_files("#file", text)
        expect(opened.page.locator("#notice")).to_contain_text("image")
        expect(opened.page.locator("#unshown")).to_contain_text("notes.jpg cannot be shown here")
        opened.page.set_input_files("#file", photograph)
        answered(opened)
        expect(opened.page.locator("#notice")).to_be_empty()


def test_an_image_of_ten_megabytes_is_answered_and_a_larger_one_is_refused_with_the_limit(
    browser: Browser, node: ServerProcess, tmp_path: Path
) -> None:
    large, too_large = tmp_path / "large.jpg", tmp_path / "larger.jpg"
    large.write_bytes(encoded() + bytes(10 * 1024 * 1024 - len(encoded())))
    too_large.write_bytes(large.read_bytes() + b"0")
    with tab(browser, node.url) as opened:
        opened.open()
        opened.page.set_input_files("#file", large)
        answered(opened)
        opened.page.set_input_files("#file", too_large)
        expect(opened.page.locator("#notice")).to_contain_text("10485760")


def test_without_a_key_the_page_says_which_scope_it_needs_and_a_wrong_key_is_named(
    browser: Browser, keyed: ServerProcess, keys: dict[str, str], photograph: Path
) -> None:
    with tab(browser, keyed.url) as opened:
        opened.open()
        expect(opened.page.locator("#notice")).to_contain_text("a key with the scope infer")
        opened.sign_in("no such key at all")
        expect(opened.page.locator("#notice")).to_contain_text("does not know that key")
        opened.sign_in(keys["infer"])
        expect(opened.page.locator("#task option")).not_to_have_count(0)
        expect(opened.page.locator("#notice")).to_be_empty()
        opened.page.set_input_files("#file", photograph)
        answered(opened)
        kept = opened.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert kept == [0, 0, "", f"{keyed.url}/#try"]
        assert "$HAWKVISION_API_KEY" in opened.page.locator("#same").inner_text()
        assert keys["infer"] not in opened.page.content()


def test_with_the_datacenter_gone_the_answer_says_so(browser: Browser, photograph: Path) -> None:
    gone = "http://127.0.0.1:9"
    with running("edge", "--port", "0", "--backend", "noop", "--datacenter-url", gone) as alone:  # noqa: SIM117
        with tab(browser, alone.url) as opened:
            opened.open()
            opened.page.set_input_files("#file", photograph)
            said = answered(opened)
            assert "Below its target" in said
            assert "Best effort" in said
            assert "datacenter" in said


def test_a_node_that_went_away_is_named_and_a_new_one_answers(browser: Browser, photograph: Path) -> None:
    command = ("edge", "--backend", "noop", "--port")
    with contextlib.ExitStack() as first:
        short = first.enter_context(running(*command, "0"))
        with tab(browser, short.url) as opened:
            opened.open()
            opened.page.set_input_files("#file", photograph)
            answered(opened)
            first.close()
            opened.page.locator("#ask").click()
            expect(opened.page.locator("#notice")).to_contain_text("does not answer")
            with running(*command, str(short.port)):
                opened.page.locator("#ask").click()
                answered(opened)


def test_a_certified_answer_says_what_that_rests_on(
    browser: Browser, certified: ServerProcess, photograph: Path
) -> None:
    with tab(browser, certified.url) as opened:
        opened.open()
        expect(opened.page.locator("#wanted")).not_to_be_empty()
        opened.page.locator("#target").press("End")
        opened.page.set_input_files("#file", photograph)
        answered(opened)
        expect(opened.page.locator("#answer .badge")).to_contain_text("Certified")
        opened.page.locator("#answer summary").press("Enter")
        expect(opened.page.locator("#answer details")).to_contain_text("less accurate than the reference stage")
        expect(opened.page.locator("#answer details")).to_contain_text("410 images, 410 of them labelled")


TASKS = {"imagenet": "edge_ensemble", "coco": "ssdlite_mobilenet_v2_int8", "coco_count": "", "coco_labels": ""}


def test_each_kind_of_task_is_drawn(browser: Browser) -> None:
    if not artifact_path(cache_dir(), "coco", TASKS["coco"]).is_file():
        pytest.skip(f"{TASKS['coco']} has not been built on this machine")
    import skimage

    astronaut = Path(skimage.__path__[0]) / "data" / "astronaut.png"
    with running("edge", "--port", "0", "--tasks", ",".join(TASKS)) as several:  # noqa: SIM117
        with tab(browser, several.url) as opened:
            opened.open()
            opened.page.set_input_files("#file", astronaut)
            answered(opened)
            opened.page.select_option("#task", "coco")
            opened.page.locator("#boxes rect").first.wait_for(state="attached")
            some = opened.page.locator("#boxes rect").count()
            opened.page.locator("#confidence").press("Home")
            assert opened.page.locator("#boxes rect").count() >= some
            opened.page.locator("#confidence").press("End")
            expect(opened.page.locator("#boxes rect")).to_have_count(0)
            opened.page.select_option("#task", "coco_count")
            expect(opened.page.locator("#answer")).to_contain_text("person")
            opened.page.select_option("#task", "coco_labels")
            expect(opened.page.locator("#answer .bars")).to_contain_text("person")
