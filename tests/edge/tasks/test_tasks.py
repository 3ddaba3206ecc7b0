"""Several tasks on one node: which of them answers, and that none takes another down."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from edge.run import _listen, _uvicorn_server
from edge.servers.shared.frontend import Frontend
from edge.serving.tasks import ServedTasks, TaskFailure
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import Quality
from hawkvision.servers.connections import Limits
from hawkvision.servers.keys import Keys
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.bench import SURE, Bench, bench, run
from tests.edge.conftest import Caller
from tests.images import encoded
from tests.waiting import until

FORM = {"Content-Type": "multipart/form-data; boundary=b"}


def form(image: bytes, task: str) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="'
    return head + b'image"\r\n\r\n' + image + b"\r\n" + head + b'task"\r\n\r\n' + task.encode() + b"\r\n--b--\r\n"


@asynccontextmanager
async def served(*nodes: Bench) -> AsyncIterator[tuple[Frontend, int]]:
    """The front end of these nodes, and the port at which they are served as `hawkvision edge up` does."""
    frontend = Frontend(EdgeMetrics(), nodes[0].clock, Keys(), 1_000_000)
    tasks = ServedTasks([*(each.node for each in nodes), TaskFailure("pets", "no manifest")])
    frontend.mark_ready(tasks)
    listener = _listen("127.0.0.1", 0)
    server = _uvicorn_server(frontend, Limits(100, 100), EdgeConfig(), None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield frontend, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def two_tasks() -> AsyncIterator[tuple[Bench, Bench, Frontend, int]]:
    async with bench(None, SURE) as one, bench(None, SURE, task="letters") as other, served(one, other) as found:
        yield one, other, *found


def post(port: int, query: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", f"/v1/infer{query}", encoded() if body is None else body, headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def test_a_full_queue_of_one_task_sheds_its_own_images_alone() -> None:
    async def scenario() -> tuple[tuple[int, Any], tuple[int, Any], float]:
        async with two_tasks() as (full, _, front, port):
            waiting = await full.occupy(1)  # the worker holds it until the gate opens
            limit = full.node.pool.limit
            waiting += [asyncio.create_task(full.ask(target=Quality.FAST)) for _ in range(limit)]
            await until(lambda: full.node.pool.waiting == limit)
            shed = await asyncio.to_thread(post, port, "?task=digits&quality=fast")
            answered = await asyncio.to_thread(post, port, "?task=letters&quality=fast")
            full.backend.gate.set()
            await asyncio.gather(*waiting)
            labels = {"task": "digits", "reason": "queue_full"}
            return shed, answered, front.metrics.registry.get_sample_value("hawkvision_shed_total", labels) or 0.0

    shed, answered, counted = run(scenario)
    assert (shed[0], answered[0], answered[1]["task"]) == (429, 200, "letters")
    assert counted == 1.0


@pytest.mark.parametrize("written", ["query", "form"])
def test_bodies_of_one_task_take_no_memory_of_another(written: str) -> None:
    async def scenario() -> list[int]:
        async with two_tasks() as (_, _, front, port):
            front.bodies_of("letters").limit_bytes = 100
            asked = [
                (f"?task={task}", None, None) if written == "query" else ("", form(encoded(), task), FORM)
                for task in ("letters", "digits")
            ]
            found = [await asyncio.to_thread(post, port, *each) for each in asked]
            held = [front.bodies_of(task).held for task in ("letters", "digits")]
            return [*(status for status, _ in found), *held]

    assert run(scenario) == [429, 200, 0, 0]


def test_pools_of_other_tasks_count_where_an_image_would_use_several_threads() -> None:
    async def scenario() -> list[bool]:
        async with bench(None, SURE) as one, bench(None, SURE, task="letters") as other:
            one.node.pool.beside = (other.node.pool,)
            before = one.node.pool.alone()
            other.backend.gate.clear()
            running_there = asyncio.create_task(other.ask(target=Quality.FAST))
            await until(lambda: other.node.pool.busy)
            meanwhile = one.node.pool.alone()
            other.backend.gate.set()
            await running_there
            return [before, meanwhile, one.node.pool.alone()]

    assert run(scenario) == [True, False, True]


@pytest.fixture(scope="module")
def several() -> Iterator[ServerProcess]:
    """A node that serves two of three tasks: one has no manifest."""
    settings = ("--task-settings", "cifar10.max_queue=7,cifar10.variant=tiny")
    with running("edge", "--port", "0", "--backend", "noop", "--tasks", "imagenet,pets,cifar10", *settings) as node:
        yield node


@pytest.fixture
def caller(several: ServerProcess) -> Iterator[Caller]:
    with closing(Caller(several)) as it:
        yield it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "status", "found"),
    [
        ("", 200, "imagenet"),
        ("task=imagenet", 200, "imagenet"),
        ("task=cifar10", 200, "cifar10"),
        ("task=pets", 503, "task 'pets' cannot be served: "),
        ("task=dogs", 404, "'imagenet' (classification), 'pets' (not loaded), 'cifar10' (classification)"),
    ],
)
def test_the_task_of_a_request_chooses_who_answers(caller: Caller, query: str, status: int, found: str) -> None:
    reply = caller.classify(encoded(), query)
    assert reply.status == status
    assert found in reply.json["task" if status == 200 else "error"]
    in_form = caller.classify(form(encoded(), query.removeprefix("task=") or "imagenet"), **FORM)
    assert (in_form.status, in_form.json.get("task")) == (status, reply.json.get("task"))


@pytest.mark.slow
def test_readiness_is_that_of_the_tasks_that_are_served_and_names_the_others(caller: Caller) -> None:
    ready = caller.get("/readyz")
    states = {each["task"]: each["status"] for each in ready.json["tasks"]}
    assert (ready.status, states) == (200, {"imagenet": "ready", "pets": "failed", "cifar10": "ready"})
    assert "pets" in next(each["reason"] for each in ready.json["tasks"] if each["task"] == "pets")
    asked = {task: caller.get(f"/readyz?task={task}").status for task in ("cifar10", "pets", "dogs")}
    assert asked == {"cifar10": 200, "pets": 503, "dogs": 404}
    assert caller.get("/v2/models/pets/ready").status == 503


@pytest.mark.slow
def test_each_task_has_its_own_targets_bounds_and_metrics(caller: Caller, several: ServerProcess) -> None:
    listed = {each["task"]: each for each in caller.get("/v1/tasks").json["tasks"]}
    assert (listed["imagenet"]["labels"], listed["cifar10"]["labels"], listed["cifar10"]["edge"]) == (1000, 10, "tiny")
    assert (listed["imagenet"]["max_queue"], listed["cifar10"]["max_queue"]) == (256 // 3, 7)
    for task in ("imagenet", "cifar10"):
        assert caller.get(listed[task]["targets"]).json["task"] == task
        assert caller.classify(encoded(), f"task={task}&quality=fast").status == 200
        assert caller.get(f"/v2/models/{task}").json["name"] == task
    page = caller.get("/metrics").body.decode()
    for task in ("imagenet", "cifar10"):
        assert f'hawkvision_queue_length{{task="{task}"}} 0.0' in page
        assert f'hawkvision_memory_budget_bytes{{part="decoding",task="{task}"}}' in page
    assert "task pets cannot be served" in several.output()


@pytest.mark.slow
def test_models_of_the_inference_protocol_are_the_tasks(caller: Caller) -> None:
    index = {each["name"]: each["state"] for each in caller.send("POST", "/v2/repository/index", b"{}").json}
    assert index == {"imagenet": "READY", "cifar10": "READY", "pets": "UNAVAILABLE"}
    raw = {"Inference-Header-Content-Length": "0"}
    replies = {t: caller.send("POST", f"/v2/models/{t}/infer", encoded(), raw) for t in ("cifar10", "pets", "dogs")}
    assert {task: reply.status for task, reply in replies.items()} == {"cifar10": 200, "pets": 503, "dogs": 404}
    assert replies["cifar10"].json["model_name"] == "cifar10"
    stats = {each["name"]: each for each in caller.get("/v2/models/stats").json["model_stats"]}
    assert set(stats) == {"imagenet", "cifar10"}
