"""`hawkvision review`: a folder is labelled over HTTP as a page does it, and certified by these labels."""

from __future__ import annotations

import csv
import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hawkvision.cascade.certification.profile_files import load_site
from hawkvision.model_zoo.building.build import build
from hawkvision.model_zoo.calibration.certify import certify_site
from hawkvision.models.manifest import load_manifest, models_dir
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.tasks.registry import load_kind
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.answers import answers_of
from tests.images import encoded

pytestmark = pytest.mark.slow
BODIES = [encoded(seed=number) for number in range(120)]
LABELS = load_kind(load_manifest("cifar10", models_dir()), models_dir()).labels


class Site(NamedTuple):
    folder: Path
    cache: Path
    truth: dict[bytes, str]
    """The class of each image: what the reference stage says of it, which is therefore always right."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder, cache = (tmp_path_factory.mktemp(name) for name in ("site", "cache"))
    build("cifar10", cache=cache)
    for number, body in enumerate(BODIES):
        (folder / f"{number:03}.jpg").write_bytes(body)
    answers = answers_of("cifar10", "reference", BODIES, cache)
    return Site(folder, cache, {body: LABELS[answer] for body, answer in zip(BODIES, answers, strict=True)})


class Desk:
    """Who labels the folder, over HTTP."""

    def __init__(self, server: ServerProcess, site: Site) -> None:
        self.server = server
        self._site = site

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers or {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def page(self, query: str = "limit=100") -> Any:
        status, body = self.ask("GET", f"/v1/review?{query}")
        assert status == 200, body
        return json.loads(body)

    def label(self, item: Any, label: str) -> Any:
        status, body = self.ask("POST", f"/v1/review/{item['id']}", {"label": label})
        assert status == 200, body
        return json.loads(body)

    def truly(self, item: Any) -> str:
        """The click that is right for an image."""
        truth = self._site.truth[self.ask("GET", item["image"])[1]]
        said = [answer["label"] for answer in item["answers"]]
        if truth in said:
            return "right" if len(said) == 1 else ("first", "second")[said.index(truth)]
        return "wrong" if len(said) == 1 else "neither"

    def label_all(self) -> int:
        done = 0
        while items := self.page("limit=20")["items"]:
            for item in items:
                self.label(item, self.truly(item))
            done += len(items)
        return done


@contextmanager
def reviewing(site: Site, folder: Path) -> Iterator[Desk]:
    command = (
        "hawkvision", "review", str(site.folder), "--task", "cifar10", "--edge", "tiny", "--port", "0",
        "--labels", str(folder / "labels.csv"), "--out", str(folder / "site.json"), "--cache-dir", str(site.cache),
    )  # fmt: skip
    with running(*command) as server:
        yield Desk(server, site)


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    with (folder / "labels.csv").open(newline="") as file:
        return {row["file"]: (row["label"], row["again"]) for row in csv.DictReader(file)}


def test_labels_certify_as_much_as_a_file_of_them_does(site: Site, tmp_path: Path) -> None:
    with reviewing(site, tmp_path) as desk:
        assert desk.server.url.endswith("/#review")
        before = desk.page()
        assert (before["audits"], before["size"], before["labelled"], before["doubt"]) == (120, 120, 0, None)
        assert [item["kind"] for item in before["items"][:30]] == ["random"] * 30
        assert {item["kind"] for item in before["items"][30:]} == {"disagreement"}
        labelled = desk.label_all()
        after = desk.page()
        assert after["labelled"] + after["repeated"] == labelled
        assert (after["contradictions"], after["random_labelled"]) == (0, 30)
        assert all(
            now["to_best"] <= was["to_best"] for now, was in zip(after["targets"], before["targets"], strict=True)
        )
        status, body = desk.ask("POST", "/v1/certificates", {"task": "cifar10"})
        assert status == 200, body
        made = json.loads(body)
        assert (made["basis"], made["n"], made["labels"]) == ("labelled", 120, after["labelled"])
        assert made["targets"] == after["targets"]
    certify_site(
        "cifar10", site.folder, tmp_path / "again.json", labels=tmp_path / "labels.csv", edges=("tiny",),
        models=models_dir(), cache=site.cache,
    )  # fmt: skip
    ours, again = load_site(tmp_path / "site.json"), load_site(tmp_path / "again.json")
    assert ours.pairs == again.pairs
    assert (ours.basis, ours.data.labels) == ("site", again.data.labels)


def test_each_label_is_on_the_disk_when_it_is_answered_and_goes_on_after_a_kill(site: Site, tmp_path: Path) -> None:
    with reviewing(site, tmp_path) as desk:
        items = desk.page()["items"][:8]
        for place, item in enumerate(items):
            desk.label(item, desk.truly(item) if place else "cannot_tell")
            assert len(rows(tmp_path)) == place + 1
        desk.label(items[-1], desk.truly(items[-1]))
        assert desk.ask("POST", f"/v1/review/{items[-1]['id']}", {"label": "cannot_tell"})[0] == 400
        assert desk.ask("DELETE", f"/v1/review/{items[-1]['id']}")[0] == 200
        (child,) = Path(f"/proc/{desk.server.pid}/task/{desk.server.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
    kept = rows(tmp_path)
    assert len(kept) == 7
    assert "cannot_tell" in {label for label, _ in kept.values()}
    with reviewing(site, tmp_path) as desk:
        page = desk.page("limit=100&labelled=true")
        assert {item["id"] for item in page["items"]} == {item["id"] for item in items[:7]}
        assert page["labelled"] == 7
        assert rows(tmp_path) == kept


def test_a_second_label_that_contradicts_the_first_takes_it_out(site: Site, tmp_path: Path) -> None:
    with reviewing(site, tmp_path) as desk:
        seen = dict[str, bytes]()
        while True:
            items = desk.page("limit=12")["items"]
            images = {item["id"]: desk.ask("GET", item["image"])[1] for item in items}
            again = next((item for item in items if images[item["id"]] in seen.values()), None)
            if again is not None:
                break
            assert items, "one in twenty comes again"
            for item in items:
                desk.label(item, desk.truly(item))
                seen[item["id"]] = images[item["id"]]
        assert again["id"] not in seen
        desk.label(again, "cannot_tell")
        page = desk.page()
        assert (page["repeated"], page["contradictions"]) == (1, 1)
        assert len([each for each in rows(tmp_path).values() if each[1] == "cannot_tell"]) == 1
        desk.ask("DELETE", f"/v1/review/{again['id']}")
        page = desk.page()
        assert (page["repeated"], page["contradictions"]) == (0, 0)


def test_wrong_labels_are_refused_and_nothing_is_written(site: Site, tmp_path: Path) -> None:
    with reviewing(site, tmp_path) as desk:
        for item in desk.page("limit=30")["items"]:
            desk.label(item, "wrong" if len(item["answers"]) == 1 else "neither")
        assert "no oftener than by chance" in desk.page()["doubt"]
        status, body = desk.ask("POST", "/v1/certificates", {})
        assert (status, b"no oftener than by chance" in body) == (400, True)
        assert not (tmp_path / "site.json").exists()


def test_only_this_machines_programs_and_the_page_itself_are_answered(site: Site, tmp_path: Path) -> None:
    with reviewing(site, tmp_path) as desk:
        status, body = desk.ask("GET", "/")
        assert (status, b"<html" in body) == (200, True)
        assert json.loads(desk.ask("GET", "/v1/tasks")[1])["tasks"][0]["task"] == "cifar10"
        own = {"Origin": f"http://127.0.0.1:{desk.server.port}", "Sec-Fetch-Site": "same-origin"}
        assert desk.ask("GET", "/v1/review", headers=own)[0] == 200
        item = desk.page()["items"][0]
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            for method, path in (("GET", "/v1/review"), ("GET", item["image"]), ("POST", f"/v1/review/{item['id']}")):
                assert desk.ask(method, path, {"label": "cannot_tell"}, headers)[0] == 403
        assert desk.page("task=cifar10")["labelled"] == 0
        for path in ("/v1/review?task=imagenet", "/v1/review?block=1", "/v1/review/1/image", "/else"):
            assert desk.ask("GET", path)[0] == 404


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file,label\nnone.jpg,cat\n", "no image is called 'none.jpg'"),
        ("file,label\n000.jpg,cow\n", "'cow' is no class"),
    ],
)
def test_a_file_of_labels_that_are_not_this_folders_is_refused(
    site: Site, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "labels.csv").write_text(text)
    result = invoke(
        "review", str(site.folder), "--task", "cifar10", "--labels", str(tmp_path / "labels.csv"), "--port", "0",
        "--cache-dir", str(site.cache),
    )  # fmt: skip
    assert (result.exit_code, says in result.output) == (1, True), result.output
    assert (tmp_path / "labels.csv").read_text() == text
