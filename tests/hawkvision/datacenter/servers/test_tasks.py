"""Several tasks behind one server: whom a request reaches, who is kept out, and what one task's failure does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import ArtifactError, ConfigError, NotFound, NotReady, Overloaded
from hawkvision.core.escalation_api import EscalationRequest
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.servers.http_server import HttpServer
from hawkvision.datacenter.servers.served_task import TaskState
from hawkvision.datacenter.servers.service import TierService
from hawkvision.datacenter.stages.catalog import TaskFailure, catalog_of, check_models, load_catalogs, loaded
from hawkvision.datacenter.stages.ensemble import EvaluationRequest, VariantAnswer
from hawkvision.models.manifest import artifact_path, parse_manifest
from hawkvision.servers.keys import Keys
from hawkvision.system.files import sha256_of
from tests.hawkvision.datacenter.conftest import MANIFEST
from tests.hawkvision.tasks.classes import classes_of, write_labels
from tests.waiting import until


class Gated:
    """Variants of one task, all sure of one class, that answer once their gate is open."""

    def __init__(self, index: int) -> None:
        self.row = np.eye(10, dtype=np.float32)[index]
        self.gate = asyncio.Event()
        self.asked = 0

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        self.asked += 1
        await self.gate.wait()
        for evaluation in evaluations:
            yield tuple(VariantAnswer(v, views, self.row, 1.0, 2.0, 3.0, 4) for v, views in evaluation.wanted.items())


_SHAPES = parse_manifest(MANIFEST, "tests")
_VARIANTS = (*_SHAPES.variants, msgspec.structs.replace(_SHAPES.variants[0], name="large"))
_STAGES = ("digits:small", "shapes:small", "shapes:medium", "shapes:large")
"""One group of digits, three of shapes."""


def server(
    max_in_flight: int = 8, route_prefix: str = "/", keys: Keys | None = None, **more: TaskFailure
) -> HttpServer:
    """Of the tasks digits and shapes, and more that have failed."""
    config = DatacenterConfig(tasks=("digits", "shapes"), variants=_STAGES, backend="noop")
    manifests = [msgspec.structs.replace(_SHAPES, task=task, variants=_VARIANTS) for task in config.tasks]
    catalogs = {each.task: catalog_of(each, classes_of(each), config) for each in manifests}
    return HttpServer(
        {**catalogs, **more},
        keys or Keys(),
        max_body_bytes=1000,
        max_in_flight=max_in_flight,
        route_prefix=route_prefix,
    )


async def call(
    to: HttpServer, path: str, body: bytes | None = None, query: str = "", **headers: str
) -> tuple[int, Any]:
    """Status and JSON of the reply to a GET, or to a POST of `body`, as uvicorn would ask."""
    sent: list[dict[str, Any]] = []
    unread = [{"type": "http.request", "body": body or b"", "more_body": False}]

    async def receive() -> Any:
        if not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    named = {k if k == "authorization" else f"x-hawkvision-{k}".replace("_", "-"): v for k, v in headers.items()}
    lines = [(name.encode(), value.encode()) for name, value in named.items()]
    method = "GET" if body is None else "POST"
    scope = {"type": "http", "method": method, "path": path, "headers": lines, "query_string": query.encode()}
    await to.asgi(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(content) if content[:1] in (b"{", b"[") else content


def ready(to: HttpServer) -> dict[str, Gated]:
    """Give each task variants with an open gate."""
    variants = {task: Gated(index) for index, task in enumerate(to.tier.tasks)}
    for task, each in variants.items():
        each.gate.set()
        to.tier.set_variants(task, each)
    return variants


def test_a_request_reaches_its_task_and_without_one_the_first() -> None:
    async def scenario() -> list[int]:
        to = server()
        ready(to)
        replies = [
            await call(to, "/v1/infer", b"image", **asked) for asked in ({}, {"task": "shapes"}, {"task": "digits"})
        ]
        return [reply["top_k"][0]["index"] for _, reply in replies]

    assert asyncio.run(scenario()) == [0, 1, 0]


def test_the_stages_of_each_task_are_listed_and_an_unknown_task_is_refused_with_those_served() -> None:
    async def scenario() -> None:
        to = server()
        ready(to)
        assert (await call(to, "/v1/stages"))[1]["task"] == "digits"
        assert (await call(to, "/v1/stages", query="task=shapes"))[1]["best"] == "large"
        assert await call(to, "/v1/stages", query="task=letters") == (
            404,
            {"error": "no task 'letters' here; this tier serves 'digits', 'shapes'", "code": "not_found"},
        )
        status, error = await call(to, "/v1/infer", b"image", task="letters")
        assert (status, "'digits', 'shapes'" in error["error"]) == (404, True)

    asyncio.run(scenario())


def test_a_task_that_cannot_be_loaded_answers_503_with_the_reason_and_the_others_go_on() -> None:
    async def scenario() -> None:
        to = server(broken=TaskFailure("the model file is missing"))
        for task, each in {"digits": Gated(0), "shapes": Gated(1)}.items():
            each.gate.set()
            to.tier.set_variants(task, each)
        assert (await call(to, "/v1/infer", b"image", task="shapes"))[0] == 200
        for path, body, query in (
            ("/v1/infer", b"image", ""),
            ("/v1/stages", None, "task=broken"),
            ("/readyz", None, "task=broken"),
        ):
            status, error = await call(to, path, body, query, task="broken")
            assert (status, error["error"]) == (503, "task 'broken' cannot be served: the model file is missing")
        status, listed = await call(to, "/readyz")
        assert (status, listed["status"]) == (200, "ready")
        assert listed["tasks"] == [
            {"task": "digits", "status": "ready"},
            {"task": "shapes", "status": "ready"},
            {
                "task": "broken",
                "status": "failed",
                "reason": "task 'broken' cannot be served: the model file is missing",
            },
        ]

    asyncio.run(scenario())


def test_readiness_tells_strangers_which_task_failed_and_callers_with_a_key_why() -> None:
    async def scenario() -> None:
        to = server(keys=Keys("the-key-of-this-tier"), broken=TaskFailure("/a/file is missing"))
        key = "Bearer the-key-of-this-tier"
        status, error = await call(to, "/readyz", query="task=broken")
        assert (status, "'broken'" in error["error"], "/a/file" in error["error"]) == (503, True, False)
        status, error = await call(to, "/readyz", query="task=broken", authorization=key)
        assert (status, error["error"]) == (503, "task 'broken' cannot be served: /a/file is missing")
        for task in ("digits", "shapes"):
            to.tier.set_variants(task, Gated(0))
        assert (await call(to, "/readyz"))[1]["tasks"][-1] == {"task": "broken", "status": "failed"}
        assert "/a/file" in (await call(to, "/readyz", authorization=key))[1]["tasks"][-1]["reason"]
        assert not any(to.keys.counts().values()), "probes are not counted"

    asyncio.run(scenario())


def test_a_tier_is_ready_while_one_task_is_and_says_of_each_what_it_lacks() -> None:
    tier = server().tier
    assert {state.status for state in tier.states()} == {"starting"}
    with pytest.raises(NotReady, match=r"still loading the models of task 'digits'.*; .*task 'shapes'"):
        tier.readiness()
    for task in tier.tasks:
        tier.set_variants(task, Gated(0))
    assert {state.status for state in tier.readiness()} == {"ready"}
    tier.set_live_replicas("shapes.medium", 0)
    _, shapes = tier.readiness()
    assert (shapes.status, shapes.reason) == ("starting", "task 'shapes' has no live replica of shapes.medium")
    tier.set_live_replicas("digits.small", 0)
    tier.record_problem("digits.small", "of another version")
    with pytest.raises(NotReady) as caught:
        tier.readiness()
    assert str(caught.value) == (
        "task 'digits' has no live replica of digits.small (of another version); "
        "task 'shapes' has no live replica of shapes.medium"
    )
    with pytest.raises(NotReady, match=r"digits\.small; "):
        tier.readiness(with_reason=False)
    tier.record_problem("digits.small", "")
    tier.set_live_replicas("digits.small", 1)
    assert tier.readiness("digits") == (TaskState("digits", "ready"),)


def test_a_task_whose_replicas_cannot_load_their_models_has_failed_until_one_can() -> None:
    tier = server().tier
    for task in tier.tasks:
        tier.set_variants(task, Gated(0))
    tier.set_live_replicas("digits.small", 0)
    tier.record_problem("digits.small", "/a/file is missing", failed=True)
    failed = TaskState("digits", "failed", "task 'digits' has no live replica of digits.small (/a/file is missing)")
    assert tier.states("digits") == (failed,)
    assert tier.states("digits", with_reason=False) == (TaskState("digits", "failed"),)
    tier.record_problem("digits.small", "")
    tier.set_live_replicas("digits.small", 1)
    assert tier.states("digits") == (TaskState("digits", "ready"),)


def test_replicas_are_counted_and_those_of_a_group_that_does_not_answer_count_as_none() -> None:
    tier = server().tier

    def counted() -> dict[str, float]:
        return {sample.labels["group"]: sample.value for sample in next(iter(tier.metrics.replicas.collect())).samples}

    for task in tier.tasks:
        tier.set_variants(task, Gated(0))
    tier.set_live_replicas("digits.small", 1)
    for group in ("digits.small", "shapes.medium", "ingress"):
        tier.count_replicas(group, 2)
    assert counted() == {"digits.small": 2, "shapes.medium": 2, "ingress": 2}
    tier.set_live_replicas("digits.small", 0)
    tier.count_replicas("digits.small", 2)
    tier.count_replicas("ingress", 1)
    assert counted() == {"digits.small": 0, "shapes.medium": 2, "ingress": 1}


def test_an_overloaded_task_keeps_no_other_task_out() -> None:
    async def scenario() -> None:
        to = server(max_in_flight=8)
        variants = ready(to)
        variants["shapes"].gate.clear()
        waiting = [asyncio.create_task(call(to, "/v1/infer", b"image", task="shapes")) for _ in range(20)]
        await until(lambda: sum(task.done() for task in waiting) == 14)
        refused = {task.result()[0] for task in waiting if task.done()}
        assert refused == {429}, "six of the eight places belong to the three groups of shapes"
        variants["digits"].gate.clear()
        others = [asyncio.create_task(call(to, "/v1/infer", b"image", task="digits")) for _ in range(2)]
        await until(lambda: variants["digits"].asked == 2)
        status, error = await call(to, "/v1/infer", b"image", task="digits")
        assert (status, error["error"]) == (429, "2 requests are already waiting or under way")
        for each in variants.values():
            each.gate.set()
        assert {status for status, _ in await asyncio.gather(*others, *waiting)} == {200, 429}

    asyncio.run(scenario())


def test_a_request_that_would_be_late_is_refused_unless_a_replica_is_free() -> None:
    async def scenario() -> list[int]:
        to = server(max_in_flight=100)
        shapes = ready(to)["shapes"]
        shapes.gate.clear()
        for group in to.tier.catalogs["shapes"].groups:
            to.tier.count_replicas(group.name, 4)
        to.tier._tasks["shapes"].admission.interval_s = 60.0
        hurried = {"task": "shapes", "deadline_ms": "60000"}
        asked = [asyncio.create_task(call(to, "/v1/infer", b"image", **hurried)) for _ in range(6)]
        await until(lambda: shapes.asked == 4 and sum(task.done() for task in asked) == 2)
        shapes.gate.set()
        return sorted([status for status, _ in await asyncio.gather(*asked)])

    assert asyncio.run(scenario()) == [200] * 4 + [429] * 2


def admitted(tier: TierService, task: str) -> Callable[[], None]:
    """Enter the tier with one request; the result leaves it."""
    place = ExitStack()
    place.enter_context(tier.admit(EscalationRequest(task=task)).in_flight())
    return place.close


def entered(tier: TierService, task: str) -> list[Callable[[], None]]:
    """Fill a task's places."""
    inside: list[Callable[[], None]] = []
    try:
        while True:
            inside.append(admitted(tier, task))
    except Overloaded:
        return inside


@given(st.integers(1, 200), st.integers(1, 200))
def test_the_limit_changes_under_requests_and_its_shares_follow_the_groups(before: int, after: int) -> None:
    async def scenario() -> None:
        tier = server(before).tier
        for task in tier.tasks:
            tier.set_variants(task, Gated(0))
        inside = {task: entered(tier, task) for task in tier.tasks}
        tier.set_limit(after)
        for leave in (leave for leaves in inside.values() for leave in leaves):
            leave()
        shares = {task: len(entered(tier, task)) for task in tier.tasks}
        assert shares["digits"] == max(1, after // 4)
        assert sum(shares.values()) == after + (after < 4), "each task has a place"

    asyncio.run(scenario())


def test_a_listener_of_its_own_answers_below_the_prefix_only() -> None:
    async def scenario() -> None:
        to = server(route_prefix="/vision")
        ready(to)
        for path in ("/v1/stages", "/healthz", "/readyz", "/v1/transport"):
            assert (await call(to, f"/vision{path}"))[0] == 200
            for elsewhere in (path, f"/visions{path}", f"/vision/vision{path}", f"/other{path}"):
                status, error = await call(to, elsewhere)
                assert (status, error["error"].endswith("below /vision")) == (404, True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("tasks", "variants", "says"),
    [
        (("shapes", "digits"), ("medium",), "expected TASK:STAGE, because there are several tasks, got 'medium'"),
        (("shapes",), ("digits:medium",), "'digits:medium' is of task 'digits'; dc.tasks has shapes"),
    ],
)
def test_stages_of_tasks_that_are_not_served_are_refused(
    config: DatacenterConfig, tasks: tuple[str, ...], variants: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_catalogs(DatacenterConfig(tasks=tasks, variants=variants, models_dir=config.models_dir))


def test_a_task_without_a_manifest_fails_alone_and_fails_the_start_if_it_is_the_only_one(
    config: DatacenterConfig,
) -> None:
    catalogs = load_catalogs(DatacenterConfig(tasks=("none", "shapes"), models_dir=config.models_dir, backend="noop"))
    assert list(catalogs) == ["none", "shapes"]
    assert list(loaded(catalogs)) == ["shapes"]
    failure = catalogs["none"]
    assert isinstance(failure, TaskFailure)
    assert "no task 'none' under" in failure.reason
    with pytest.raises(NotFound, match="no task 'none'"):
        load_catalogs(DatacenterConfig(tasks=("none",), models_dir=config.models_dir))


def test_a_start_is_refused_early_only_if_each_task_lacks_model_files(tmp_path: Path) -> None:
    models, cache = tmp_path / "models", tmp_path / "cache"
    built = artifact_path(cache, "digits", "small")
    built.parent.mkdir(parents=True)
    built.write_bytes(b"a model")
    hashed = MANIFEST.replace('name = "small"\n', f'name = "small"\nsha256 = "{sha256_of(b"a model")}"\n', 1)
    for task in ("digits", "shapes"):
        (models / task).mkdir(parents=True)
        (models / task / "manifest.toml").write_text(hashed.replace('"shapes"', f'"{task}"'))
        write_labels(models / task)
    config = DatacenterConfig(
        tasks=("shapes", "digits"),
        variants=("shapes:small", "digits:small"),
        models_dir=models,
        cache_dir=cache,
    )
    check_models(config, load_catalogs(config))
    built.write_bytes(b"another model")
    with pytest.raises(ArtifactError, match="the model file is missing; build it with"):
        check_models(config, load_catalogs(config))
