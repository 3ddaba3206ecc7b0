"""The view *review* for kinds of task other than classification: numbers, sets of labels, and boxes to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.core.types import LabelledClass, Prediction
from hawkvision.models.manifest import artifact_path, cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import running
from hawkvision.tasks.counting import Counts
from hawkvision.tasks.detection import DetectedObject, Detection
from hawkvision.tasks.multi_label import LabelSet
from hawkvision.tasks.registry import load_kind
from tests.browser import tab
from tests.edge.conftest import Caller
from tests.edge.peer import running_peer
from tests.images import encoded

ANSWERS: Final[dict[str, Prediction]] = {
    "coco_count": Counts({"image": {"person": 3, "vehicle": 1}}, 0.9),
    "coco_labels": LabelSet((LabelledClass("cat", 15, 0.9),), 0.9),
    "coco": Detection((DetectedObject("cat", 15, 0.9, (0.1, 0.1, 0.5, 0.6)),), 0.9),
}
"""Of the tier; the edge stage answers otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("task", ANSWERS)
def test_a_count_takes_a_number_a_set_its_correction_and_boxes_are_looked_at(
    browser: Browser, task: str, tmp_path: Path
) -> None:
    manifest = load_manifest(task, models_dir())
    edge, best = manifest.cascade.default_edge, manifest.best
    if not artifact_path(cache_dir(), task, edge).is_file() and not artifact_path(cache_dir(), "coco", edge).is_file():
        pytest.skip(f"{edge} has not been built on this machine")
    stage = load_profile(models_dir() / task / "profile.json").stage(best)
    answer, kind = ANSWERS[task], load_kind(manifest, models_dir())
    with running_peer(
        task=task, model=best, fingerprint=stage.fingerprint, kind=kind, answers=(answer, answer)
    ) as tier:
        command = (
            "edge", "--port", "0", "--task", task, "--datacenter-url", tier.url, "--audit-share", "0.2",
            "--state-file", str(tmp_path / "state"), "--review-max-bytes", "1000000", "--review-max-days", "1",
        )  # fmt: skip
        with running(*command) as node, tab(browser, node.url) as opened:
            caller = Caller(node)
            while caller.get("/v1/review").json["waiting"] < 3:
                assert caller.send("POST", "/v1/infer?quality=fast", encoded()).status == 200
            opened.open("review")
            expect(opened.page.locator("#item .answers")).to_contain_text("cat" if task != "coco_count" else "3")
            if task == "coco":
                expect(opened.page.locator("#item")).to_contain_text("Detection is for looking only")
                expect(opened.page.locator("#item rect").first).to_be_attached()
                opened.page.get_by_role("button", name="Next").click()
                expect(opened.page.locator("#item rect").first).to_be_attached()
                return
            if task == "coco_count":
                opened.page.get_by_label("person").fill("2")
                opened.page.get_by_label("vehicle").fill("0")
                said: object = {"person": 2, "vehicle": 0}
            else:
                opened.page.get_by_label("The right labels").fill("cat, dog")
                said = ["cat", "dog"]
            opened.page.get_by_role("button", name="Say so").click()
            expect(opened.page.locator("#progress")).to_contain_text("1 image judged")
            (labelled,) = caller.get("/v1/review?labelled=true").json["items"]
            assert labelled["label"] == said
            caller.close()
