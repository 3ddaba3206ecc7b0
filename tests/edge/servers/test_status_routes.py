"""The live view over real sockets: what it says, who may watch, and that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.types import Message, Scope

from edge.servers import openapi
from edge.servers.http import HttpApp
from edge.servers.shared.frontend import Frontend
from edge.servers.status_routes import MOST_WATCHERS
from edge.serving.tasks import ServedTasks
from hawkvision.servers.keyfile import Scope as KeyScope
from hawkvision.servers.keyfile import add_key, remove_key
from hawkvision.servers.keys import Keys
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.bench import bench
from tests.edge.conftest import Caller
from tests.edge.peer import Peer
from tests.edge.servers.conftest import SINGLE
from tests.images import encoded
from tests.waiting import wait_until

DOCUMENT = json.loads(json.dumps(openapi.document()))


class Watcher:
    """Reads the lines of one node."""

    def __init__(self, node: ServerProcess, key: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._connection.request("GET", "/v1/status?watch=true", headers=headers)
        self.response = self._connection.getresponse()

    def line(self) -> Any:
        """The next one; None at the end."""
        line = self.response.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self.response.close()
        self._connection.close()


@contextlib.contextmanager
def watching(node: ServerProcess, key: str | None = None) -> Iterator[Watcher]:
    with closing(Watcher(node, key)) as watcher:
        assert watcher.response.status == 200, watcher.response.read()
        yield watcher


def status(caller: Caller, key: str | None = None) -> Any:
    found = caller.send("GET", "/v1/status", headers={} if key is None else {"Authorization": f"Bearer {key}"})
    assert found.status == 200, found.body
    return found.json


def test_the_status_tells_what_became_of_the_last_requests(peer: Peer) -> None:
    with running("edge", "--port", "0", "--backend", "noop", "--datacenter-url", peer.url) as node:
        caller, none = Caller(node), Caller(node)
        (idle,) = status(none)["tasks"]
        assert (idle["answers"], idle["p50_ms"], idle["refused"]) == (0, None, 0.0)
        asked = ("quality=fast&stream=yard", "quality=best", "quality=best&stream=yard", "deadline_ms=0.001")
        answers = [caller.classify(encoded(), query).json for query in asked]
        assert caller.classify(b"no image").status == 415
        found = status(caller)
        caller.close()
    (task,) = found["tasks"]
    assert (task["task"], task["kind"], task["queue"], task["queue_limit"]) == ("imagenet", "classification", 0, 256)
    assert task["answers"] == 4
    assert [task[each] for each in ("edge", "escalated", "degraded", "refused")] == [0.4, 0.4, 0.2, 0.2]
    assert 0.0 < task["p50_ms"] < task["p99_ms"] <= max(answer["ms"] for answer in found["answers"])
    assert 0.0 < task["per_s"] <= 5.0
    assert [answer["id"] for answer in found["answers"]] == [answer["id"] for answer in reversed(answers)]
    assert [answer["degraded_reason"] for answer in found["answers"]] == ["no_time", None, None, None]
    assert [answer["tier"] for answer in found["answers"]] == ["edge", "datacenter", "datacenter", "edge"]
    nameless, yard, no_name, as_yard = (answer["stream"] for answer in found["answers"])
    assert (yard, nameless) == (as_yard, no_name)
    assert yard != nameless
    assert "yard" not in json.dumps(found), "names of streams are not revealed"
    assert (found["ready"], found["draining"], found["failed"]) == (True, False, [])
    assert found["datacenter"]["configured"]
    assert found["datacenter"]["up"]
    assert found["datacenter"]["rtt_ms"] > 0.0
    assert found["link"] == {"transport": "tcp", "loss": None, "rtt_ms": None}
    assert found["memory"]["resident_bytes"] > 10_000_000 < found["memory"]["bodies_limit_bytes"]
    described = {**DOCUMENT, "$ref": "#/components/schemas/Status"}
    Draft202012Validator(described).validate(found)


def test_without_a_datacenter_nothing_is_said_of_one(keyed: ServerProcess) -> None:
    with closing(Caller(keyed)) as caller:
        found = status(caller, SINGLE)
        assert caller.send("GET", "/v1/status?watch=maybe", headers={"Authorization": f"Bearer {SINGLE}"}).status == 400
    assert not found["datacenter"]["configured"]
    assert {found["datacenter"][each] for each in ("up", "circuit_breaker", "rtt_ms")} == {None}
    assert found["link"]["transport"] is None


# ------------------------------------------------------------------------------------------------------- watching


def test_lines_go_on_while_answers_come(edge: ServerProcess, caller: Caller) -> None:
    with watching(edge) as watcher:
        assert watcher.response.getheader("content-type") == "application/x-ndjson"
        before = watcher.line()
        answer = caller.classify(encoded(), "quality=fast").json
        lines = [watcher.line() for _ in range(2)]
    assert lines[-1]["answers"][0]["id"] == answer["id"]
    assert before["time"] < lines[0]["time"] < lines[1]["time"]


def test_who_watches_needs_a_key_that_may_observe(keyed: ServerProcess, keys: dict[str, str]) -> None:
    with watching(keyed, keys["prometheus"]) as watcher:
        assert watcher.line()["ready"]
    for key, refused in ((None, 401), ("a-key-that-is-none", 401), (keys["camera"], 403), (keys["operator"], 403)):
        with closing(Watcher(keyed, key)) as stranger:
            assert stranger.response.status == refused


def test_a_key_that_is_removed_watches_no_more(keyed: ServerProcess, key_file: Path) -> None:
    key = add_key(key_file, "visitor", [KeyScope.OBSERVE])
    with closing(Caller(keyed)) as caller:
        known = {"Authorization": f"Bearer {key}"}
        wait_until(lambda: caller.send("GET", "/v1/status", headers=known).status == 200)
    with watching(keyed, key) as watcher:
        assert watcher.line() is not None
        remove_key(key_file, "visitor")
        while watcher.line() is not None:
            pass


def test_one_watcher_too_many_is_refused_until_another_leaves(edge: ServerProcess) -> None:
    with contextlib.ExitStack() as all_of_them:
        first, *_ = [all_of_them.enter_context(watching(edge)) for _ in range(MOST_WATCHERS)]
        with closing(Watcher(edge)) as refused:
            assert refused.response.status == 429
            assert refused.response.getheader("retry-after") == "1"
            assert json.loads(refused.response.read())["code"] == "overloaded"
        first.close()

        def admitted() -> bool:
            with closing(Watcher(edge)) as another:
                return another.response.status == 200

        wait_until(admitted)


def test_head_of_the_lines_ends_at_once(caller: Caller) -> None:
    assert caller.send("HEAD", "/v1/status?watch=true").status == 200
    assert caller.get("/healthz").status == 200


def test_lines_end_when_the_node_is_told_to_stop() -> None:
    with running("edge", "--port", "0", "--backend", "noop") as node, watching(node) as watcher:
        assert not watcher.line()["draining"]
        assert node.stop() == 0
        *_, last = iter(watcher.line, None)
        assert (last["draining"], last["ready"]) == (True, False)


def test_lines_are_made_once_for_all_and_who_does_not_read_delays_nobody_and_misses_some() -> None:
    """As the server sees them: a line is sent when the last one has left."""

    async def scenario() -> list[list[str]]:
        async with bench(None) as it:
            frontend = Frontend(it.node.metrics, it.clock, Keys(), 1_000_000)
            frontend.mark_ready(ServedTasks([it.node]))
            app, reads, enough = HttpApp(frontend), asyncio.Event(), asyncio.Event()

            async def watch(lines: list[str], least: int, may_send: asyncio.Event) -> None:
                gone = asyncio.Event()

                async def receive() -> Message:
                    await gone.wait()
                    return {"type": "http.disconnect"}

                async def send(message: Message) -> None:
                    if body := message.get("body"):
                        lines.append(json.loads(body)["time"])
                        await may_send.wait()
                        if len(lines) >= least:
                            gone.set()

                scope: Scope = {
                    "type": "http", "method": "GET", "path": "/v1/status", "query_string": b"watch=true",
                    "headers": [], "asgi": {"version": "3.0", "spec_version": "2.3"},
                }  # fmt: skip
                await app(scope, receive, send)

            enough.set()
            slow, fast, other = list[str](), list[str](), list[str]()
            stuck = asyncio.create_task(watch(slow, 2, reads))
            await asyncio.gather(watch(fast, 4, enough), watch(other, 4, enough))
            assert len(slow) == 1, "nothing more is made for it"
            reads.set()
            await stuck
            return [slow, fast, other]

    slow, fast, other = asyncio.run(scenario())
    assert len(set(fast) & set(other)) >= 2
    assert slow[1] > fast[2], "those between are skipped"


# --------------------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def review_keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    return file, {scope.value: add_key(file, scope.value, [scope]) for scope in KeyScope}


def test_images_are_shown_to_who_may_review_while_somebody_watches(review_keys: tuple[Path, dict[str, str]]) -> None:
    file, keys = review_keys
    bound = str(2 * len(encoded()) + 1)
    allowed = ("--review-max-bytes", bound, "--review-max-days", "1", "--keys-file", str(file))
    with running("edge", "--port", "0", "--backend", "noop", *allowed) as node, closing(Caller(node)) as caller:
        sending, reviewing = ({"Authorization": f"Bearer {keys[each]}"} for each in ("infer", "review"))
        asked = "/v1/classify?quality=fast"
        assert caller.send("POST", asked, encoded(), sending).status == 200
        assert status(caller, keys["observe"])["answers"][0]["image"] is None, "nobody watched"
        with watching(node, keys["observe"]) as watcher:
            watcher.line()
            for _ in range(3):
                caller.send("POST", asked, encoded(), sending)
            watcher.line()
            shown = [answer["image"] for answer in watcher.line()["answers"]]
            assert shown[2:] == [None, None], "there is room for two"
            found = caller.send("GET", shown[0], headers=reviewing)
            assert (found.status, found.body) == (200, encoded())
            assert found.headers["content-type"] == "image/jpeg"
            assert found.headers["cache-control"] == "no-store"
            for scope in ("infer", "observe", "operate"):
                refused = caller.send("GET", shown[0], headers={"Authorization": f"Bearer {keys[scope]}"})
                assert refused.status == 403
        wait_until(lambda: caller.send("GET", shown[0], headers=reviewing).status == 404)


def test_no_image_is_shown_where_none_may_be_kept(edge: ServerProcess, caller: Caller) -> None:
    with watching(edge) as watcher:
        watcher.line()
        answer = caller.classify(encoded(), "quality=fast").json
        watcher.line()
        shown = watcher.line()["answers"][0]
        assert (shown["id"], shown["image"]) == (answer["id"], None)
        missing = caller.get(f"/v1/status/answers/{answer['id']}/image")
    assert missing.status == 404
    assert "review_max_bytes" in missing.json["error"]
