"""Review over HTTP: a node keeps audits, a person with a key of that scope labels them, and certificates come of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.monitoring.labelling import Showing
from hawkvision.cascade.certification.profile import design_sha256
from hawkvision.cascade.certification.profile_files import load_profile, load_site
from hawkvision.client import Client
from hawkvision.core.errors import BadField, Forbidden
from hawkvision.models.manifest import artifact_path, cache_dir, models_dir
from hawkvision.servers.keyfile import Scope, add_key
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller, Reply
from tests.edge.peer import ANSWER_CLASS, Peer, running_peer
from tests.images import encoded
from tests.waiting import until

pytestmark = pytest.mark.slow
EDGE = "squeezenet1_1_int8"
PROFILE = load_profile(models_dir() / "imagenet" / "profile.json")
REFERENCE = PROFILE.stage("reference").fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("review")


@pytest.fixture(scope="module")
def keys(folder: Path) -> dict[str, str]:
    return {scope.value: add_key(folder / "keys.toml", scope.value, [scope]) for scope in Scope}


@pytest.fixture(scope="module")
def datacenter() -> Iterator[Peer]:
    with running_peer(model="reference", fingerprint=REFERENCE, intermediate="upright_ensemble") as peer:
        yield peer


@pytest.fixture(scope="module")
def node(folder: Path, keys: dict[str, str], datacenter: Peer) -> Iterator[ServerProcess]:
    """A node that has audited some sixty images, which the tier answers otherwise."""
    if not artifact_path(cache_dir(), "imagenet", EDGE).is_file():
        pytest.skip(f"{EDGE} has not been built on this machine")
    command = [
        "edge", "--port", "0", "--backend", "onnxruntime", "--variant", EDGE, "--datacenter-url", datacenter.url,
        "--state-file", str(folder / "state"), "--certificates", str(folder / "certificates.json"),
        "--audit-share", "0.2",
        "--review-max-bytes", "10000000", "--review-max-days", "1", "--keys-file", str(folder / "keys.toml"),
    ]  # fmt: skip
    with running(*command) as process:
        at = Desk(process, keys)
        while at.shown()["audits"] < 55:
            for _ in range(20):
                assert at.caller.classify(encoded(), "quality=fast", **at.key("infer")).status == 200
        yield process


class Desk:
    """Who asks a node with one of its keys."""

    def __init__(self, node: ServerProcess, keys: dict[str, str]) -> None:
        self.caller = Caller(node)
        self._keys = keys

    def key(self, scope: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys[scope]}"}

    def ask(self, method: str, path: str, body: Any = None, scope: str = "review") -> Reply:
        sent = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        return self.caller.send(method, path, sent, self.key(scope))

    def shown(self, query: str = "") -> Any:
        reply = self.ask("GET", f"/v1/review?{query}")
        assert reply.status == 200, reply.body
        return reply.json


@pytest.fixture
def desk(node: ServerProcess, keys: dict[str, str]) -> Iterator[Desk]:
    desk = Desk(node, keys)
    yield desk
    desk.caller.close()


def test_disagreements_wait_with_their_images_page_by_page(desk: Desk) -> None:
    first = desk.shown("limit=10")
    assert (first["task"], first["block"], first["size"], first["keeps_images"]) == ("imagenet", 0, 2048, True)
    assert (len(first["items"]), first["next"]) == (10, 10)
    second = desk.shown("limit=10&offset=10")
    assert not {item["id"] for item in first["items"]} & {item["id"] for item in second["items"]}
    item = first["items"][0]
    assert len(item["answers"]) == 2
    assert item["choices"] == ["first", "second", "neither", "cannot_tell"]
    image = desk.ask("GET", item["image"])
    assert (image.status, image.body) == (200, encoded())
    assert image.headers["content-type"] == "image/jpeg"
    assert image.headers["cache-control"] == "no-store"


def test_a_label_is_kept_and_can_be_taken_back(desk: Desk) -> None:
    item = desk.shown()["items"][0]
    said = desk.ask("POST", f"/v1/review/{item['id']}", {"label": item["answers"][0]["label"]})
    assert (said.status, said.json["label"]) == (200, item["answers"][0]["label"])
    assert [each["id"] for each in desk.shown("labelled=true")["items"]] == [item["id"]]
    assert desk.ask("DELETE", f"/v1/review/{item['id']}").json["label"] is None
    assert desk.shown("labelled=true")["items"] == []


def test_people_with_names_are_given_different_images(desk: Desk) -> None:
    one, other = (desk.shown(f"limit=5&reviewer={name}") for name in ("one", "other"))
    assert not {item["id"] for item in one["items"]} & {item["id"] for item in other["items"]}
    assert one["waiting"] == other["waiting"] == desk.shown()["waiting"] > 10
    refused = desk.ask("GET", f"/v1/review?reviewer={'x' * 65}")
    assert (refused.status, "length <= 64" in refused.json["error"]) == (400, True)


@pytest.mark.parametrize("scope", [scope for scope in Scope if scope is not Scope.REVIEW])
def test_callers_images_need_a_key_for_review(desk: Desk, scope: Scope) -> None:
    for method, path in (("GET", ""), ("GET", "/1/image"), ("HEAD", "/1/image"), ("POST", "/1"), ("DELETE", "/1")):
        refused = desk.ask(method, f"/v1/review{path}", scope=scope)
        assert refused.status == 403
        if method != "HEAD":
            assert f"the key '{scope}' may {scope}; this needs a key that may review" in refused.json["error"]
    assert desk.caller.get("/v1/review").status == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "?block=1", None, 404, "there is none of number 1"),
        ("GET", "?block=x", None, 400, "query: Expected `int | null`, got `str` - at `$.block`"),
        ("GET", "?limit=101", None, 400, "query: Expected `int` <= 100"),
        ("GET", "?what=1", None, 400, "unknown field `what`"),
        ("GET", "?task=other", None, 404, "'other' is not served here"),
        ("GET", f"/{Showing(1000).id}/image", None, 404, "is kept (any more)"),
        ("GET", "/x/image", None, 404, "no image 'x'"),
        ("POST", "/1", b"", 400, "missing required field `label`"),
        ("POST", "/1", b"{", 400, "body:"),
        ("POST", "/1", {"label": "first", "more": 1}, 400, "unknown field `more`"),
        ("POST", "/1", {"label": None}, 400, "DELETE takes a label back"),
        (
            "POST",
            f"/{Showing(1).id}",
            {"label": "a cat of no kind"},
            400,
            "takes first, second, neither, cannot_tell, or: label",
        ),
        ("POST", "/1", b'{"label": "' + b"x" * 70_000 + b'"}', 413, "more than 65536 bytes"),
        ("POST", "/9999999", {"label": "first"}, 404, "no image '9999999'"),
        ("PUT", "/1", {"label": "first"}, 403, "needs a key that may operate"),
    ],
)
def test_what_is_malformed_is_refused_and_said(
    desk: Desk, method: str, path: str, body: Any, status: int, says: str
) -> None:
    refused = desk.ask(method, f"/v1/review{path}", body)
    assert (refused.status, says in refused.json["error"]) == (status, True), refused.body


def test_both_stages_answer_an_image_that_is_compared_and_it_is_no_evidence(desk: Desk) -> None:
    before = desk.shown()["audits"]
    found = [desk.ask("POST", "/v1/compare?task=imagenet", encoded(), "operate") for _ in range(12)]
    assert [reply.status for reply in found] == [200] * 12
    told = found[0].json
    assert all(reply.json == told for reply in found)
    fast = desk.caller.classify(encoded(), "quality=fast", **desk.key("infer")).json
    assert (told["task"], told["edge"], told["best"], told["disagreement"]) == ("imagenet", EDGE, "reference", 1.0)
    assert (told["answer"]["index"], told["reference"]["index"]) == (fast["index"], ANSWER_CLASS)
    assert told["score"] == pytest.approx(fast["edge_score"], abs=1e-6)
    assert told["design"] == design_sha256(PROFILE, (PROFILE.pair(EDGE, "reference"),))
    assert desk.shown()["audits"] - before <= 1, "of the request that was none"


@pytest.mark.parametrize(
    ("method", "query", "body", "scope", "status", "says"),
    [
        ("POST", "", b"no image", "operate", 415, "unsupported_media"),
        ("POST", "?task=other", encoded(), "operate", 404, "not_found"),
        ("POST", "?what=1", encoded(), "operate", 400, "bad_field"),
        ("GET", "", None, "operate", 405, "method_not_allowed"),
        ("POST", "", encoded(), "infer", 403, "forbidden"),
        ("POST", "", encoded(), "review", 403, "forbidden"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    desk: Desk, method: str, query: str, body: bytes | None, scope: str, status: int, says: str
) -> None:
    refused = desk.ask(method, f"/v1/compare{query}", body, scope)
    assert (refused.status, refused.json["code"]) == (status, says), refused.body


def test_a_datacenter_that_fails_or_is_none_is_said(desk: Desk, datacenter: Peer) -> None:
    datacenter.status = 500
    try:
        refused = desk.ask("POST", "/v1/compare", encoded(), "operate")
    finally:
        datacenter.status = 200
    assert (refused.status, "the reference stage reference did not answer" in refused.json["error"]) == (503, True)
    with running("edge", "--port", "0", "--backend", "noop") as alone:
        caller = Caller(alone)
        refused = caller.send("POST", "/v1/compare", encoded())
        caller.close()
    assert (refused.status, "no datacenter" in refused.json["error"]) == (404, True)


def test_certificates_are_made_and_put_in_force_by_who_may_operate(
    node: ServerProcess, desk: Desk, keys: dict[str, str], folder: Path
) -> None:
    assert desk.ask("POST", "/v1/certificates", {}).status == 403
    url = f"http://127.0.0.1:{node.port}"
    with Client(url, api_key=keys["review"]) as client, pytest.raises(Forbidden):
        client.certify()
    with Client(url, api_key=keys["operate"]) as client:
        item = desk.shown()["items"][0]
        desk.ask("POST", f"/v1/review/{item['id']}", {"label": "cannot_tell"})
        made = client.certify("imagenet")
        assert (made["edge"], made["basis"], made["labels"]) == (EDGE, "agreement", 0)
        assert desk.ask("POST", f"/v1/review/{item['id']}", {"label": "neither"}).status == 400
        desk.ask("DELETE", f"/v1/review/{item['id']}")
        desk.ask("POST", f"/v1/review/{item['id']}", {"label": "neither"})
        with pytest.raises(BadField, match="expected at least 24"):
            client.certify()
        desk.ask("DELETE", f"/v1/review/{item['id']}")
    assert load_site(folder / "certificates.json").basis == "review"
    asyncio.run(until(lambda: "certificates: read again, and in force from now on" in node.output()))
    printed = subprocess.run(
        [sys.executable, "-m", "hawkvision", "certify", "--from", url],
        env={**os.environ, "COLUMNS": "160", "HAWKVISION_API_KEY": keys["operate"]},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert printed.returncode == 0, printed.stderr
    assert f"audits of {url}, block 0; in force there within seconds" in printed.stdout
    assert EDGE in printed.stdout
