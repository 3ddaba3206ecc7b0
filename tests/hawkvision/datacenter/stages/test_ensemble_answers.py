"""The server, in memory: which members it asks, and the reply it builds from their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import Overloaded
from hawkvision.core.escalation_api import EscalationReply, IntermediateResult
from hawkvision.core.types import Logits
from hawkvision.datacenter.servers.http_server import HttpServer
from hawkvision.datacenter.stages.catalog import Catalog, ServedStage
from hawkvision.datacenter.stages.ensemble import Augmentation, EvaluationRequest, VariantAnswer
from hawkvision.servers.keys import Keys
from tests.hawkvision.tasks.classes import classes, predicted, read_reply, top_k
from tests.waiting import until

ROWS = arrays(np.float32, (3, 6), elements=st.floats(0.0078125, 1.0, width=32))
MEMBERS = ("a", "b", "c")


@dataclass
class Fixed:
    """Variants that answer with fixed probabilities and remember what they were asked; "c" may be full."""

    rows: dict[str, Logits]
    full: bool = False
    took: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Milliseconds of decoding, waiting and inference; 1, 2 and 3 for those that are not here."""
    asked: list[tuple[str, Augmentation]] = field(default_factory=list)

    async def ask(
        self,
        evaluations: Sequence[EvaluationRequest],
        image: bytes,
        deadline: Deadline | None,
        *,
        streaming: bool,
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        for evaluation in evaluations:
            self.asked.extend(evaluation.wanted.items())
            if self.full and "c" in evaluation.wanted:
                raise Overloaded("the queue of 'c' is full", 1.0)
            answers = tuple(
                VariantAnswer(v, views, self.rows[v], *self.took.get(v, (1.0, 2.0, 3.0)), 4)
                for v, views in evaluation.wanted.items()
            )
            for part in [(answer,) for answer in answers] if streaming else [answers]:
                yield part


def server(variants: Fixed, temperature: float = 1.0) -> HttpServer:
    stages = (ServedStage("a", ("a",)), ServedStage("all", MEMBERS, mirrored=True, temperature=temperature))
    made = HttpServer(
        {"shapes": Catalog("shapes", classes(6), stages, (), False)}, Keys(), max_body_bytes=1000, max_in_flight=10
    )
    made.tier.set_variants("shapes", variants)
    return made


def post(to: HttpServer, **headers: str) -> Response:
    async def receive() -> Message:
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": b"image", "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[bool] = []
    lines = [(f"x-hawkvision-{k}".replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/infer", "headers": lines, "query_string": b""}
    return asyncio.run(to.respond(Request(scope, receive)))


def served(response: Response) -> dict[int, float]:
    return {c.index: c.confidence for c in top_k(read_reply(response.body))}


@given(ROWS)
def test_an_ensemble_answers_the_exact_numpy_mean_of_its_members(rows: Logits) -> None:
    answer = served(post(server(Fixed(dict(zip(MEMBERS, rows, strict=True)))), top_k="6"))
    expected = rows.astype(np.float64).mean(axis=0).astype(np.float32)
    assert [answer[i] for i in range(6)] == [float(x) for x in expected]


@given(ROWS, st.floats(0.3, 3.0))
def test_an_ensemble_temperature_is_applied_to_the_logarithm_of_the_mean(weights: Logits, t: float) -> None:
    rows = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    answer = served(post(server(Fixed(dict(zip(MEMBERS, rows, strict=True))), t), top_k="6"))
    powered = rows.astype(np.float64).mean(axis=0) ** (1 / t)
    np.testing.assert_allclose([answer[i] for i in range(6)], powered / powered.sum(), rtol=1e-4)


def test_an_ensemble_reports_the_times_of_its_slowest_member() -> None:
    took = {"a": (1.0, 0.0, 9.0), "b": (1.0, 8.0, 3.0), "c": (1.0, 7.0, 2.0)}
    response = post(server(Fixed({m: np.ones(6, np.float32) for m in MEMBERS}, took=took)))
    timing = read_reply(response.body).timing_ms
    assert (timing.decode, timing.queue, timing.infer) == (1.0, 8.0, 3.0)


def test_a_full_member_sheds_the_whole_ensemble_with_retry_after() -> None:
    response = post(server(Fixed({m: np.ones(6, np.float32) for m in MEMBERS}, full=True)))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


INTERMEDIATE = {"variant": "a", "score": "top1", "otherwise": "all"}


def unequal() -> Fixed:
    """Variants of which "a" is sure of class 2 and the others know nothing."""
    sure = np.array([0.04, 0.04, 0.8, 0.04, 0.04, 0.04], np.float32)
    return Fixed({"a": sure, "b": np.full(6, 1 / 6, np.float32), "c": np.full(6, 1 / 6, np.float32)})


@pytest.mark.parametrize(("accept_score", "model"), [("0.8", "a"), ("0.81", "all")])
def test_the_reply_names_the_stage_that_answered_and_states_its_own_score(accept_score: str, model: str) -> None:
    answer = read_reply(post(server(unequal()), accept_score=accept_score, **INTERMEDIATE).body)
    assert (answer.model, top_k(answer)[0].index) == (model, 2)
    assert answer.score == top_k(answer)[0].confidence
    assert answer.passed_over == (
        None if model == "a" else IntermediateResult(predicted((2, 0.0)), float(np.float32(0.8)))
    )


def test_the_times_of_two_stages_add_up() -> None:
    answer = read_reply(post(server(unequal()), accept_score="1", **INTERMEDIATE).body)
    assert (answer.timing_ms.decode, answer.timing_ms.queue, answer.timing_ms.infer) == (2.0, 4.0, 6.0)


class Stuck(Fixed):
    """Variants of which "b" never answers."""

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        async with aclosing(super().ask(evaluations, image, deadline, streaming=streaming)) as parts:
            async for part in parts:
                if any(answer.variant == "b" for answer in part):
                    await asyncio.Event().wait()
                yield part


def test_a_second_stage_that_outlasts_the_deadline_is_cancelled() -> None:
    response = post(server(Stuck(unequal().rows)), accept_score="1", deadline_ms="50", **INTERMEDIATE)
    assert (response.status_code, msgspec.json.decode(response.body)["code"]) == (504, "deadline_missed")


def test_work_ends_when_its_caller_disconnects() -> None:
    to, statuses = server(Stuck(unequal().rows)), list[int]()
    messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"image"}]

    async def receive() -> Message:
        return messages.pop()

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    async def scenario() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/infer", "headers": [], "query_string": b""}
        await to.asgi(scope, receive, send)
        await until(lambda: inside(to) == 0)

    asyncio.run(scenario())
    assert statuses[0] == 499


def stream(to: HttpServer, until_lines: int = 0, **headers: str) -> tuple[int, list[EscalationReply]]:
    """Status and lines of a progressive request; the caller leaves after so many lines."""
    body: list[bytes] = []
    status: list[int] = []

    async def call() -> None:
        left, sent = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": b"image", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            elif message["body"]:
                body.append(message["body"])
                if len(body) == until_lines:
                    left.set()

        lines = [(f"x-hawkvision-{k}".replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        lines.append((b"x-hawkvision-progressive", b"1"))
        scope = {"type": "http", "method": "POST", "path": "/v1/infer", "headers": lines, "query_string": b""}
        await to.asgi(scope, receive, send)
        await until(lambda: inside(to) == 0)

    asyncio.run(call())
    replies = [read_reply(line) for line in b"".join(body).splitlines()] if status == [200] else []
    return status[0], replies


def inside(to: HttpServer) -> float:
    """Images that count against the tier's bound."""
    return next(s.value for m in to.tier.metrics.in_flight.collect() for s in m.samples)


def test_a_progressive_reply_has_a_line_per_partial_result_and_one_for_the_final() -> None:
    plain = read_reply(post(server(unequal())).body)
    status, lines = stream(server(unequal()))
    assert (status, [line.complete for line in lines]) == (200, [False, False, True])
    assert [line.model for line in lines] == ["all"] * 3
    assert top_k(lines[-1]) == top_k(plain)
    assert {line.timing_ms.first for line in lines} == {lines[0].timing_ms.total}


def test_a_progressive_reply_of_one_variant_is_a_plain_one() -> None:
    status, (line,) = stream(server(unequal()), variant="a")
    assert (status, line.complete) == (200, True)


def test_the_last_partial_result_is_the_reply_if_the_deadline_comes_first() -> None:
    to = server(Stuck(unequal().rows))
    status, lines = stream(to, deadline_ms="50")
    assert (status, [line.complete for line in lines]) == (200, [False, False])
    assert top_k(lines[-1]) == top_k(lines[0])
    counted = [s.value for m in to.tier.metrics.incomplete.collect() for s in m.samples if s.name.endswith("_total")]
    assert counted == [1.0]


def test_an_intermediate_stage_that_is_not_sure_enough_is_the_first_line() -> None:
    status, lines = stream(server(Stuck(unequal().rows)), 0, accept_score="1", deadline_ms="50", **INTERMEDIATE)
    assert (status, lines[0].model, lines[0].complete) == (200, "all", False)
    assert lines[0].passed_over == IntermediateResult(predicted((2, 0.0)), float(np.float32(0.8)))


def test_an_error_before_the_first_line_has_its_status() -> None:
    assert stream(server(Fixed(unequal().rows, full=True)))[0] == 429


def test_a_progressive_caller_that_leaves_ends_the_work() -> None:
    status, lines = stream(server(Stuck(unequal().rows)), until_lines=1)
    assert (status, len(lines)) == (200, 1)
