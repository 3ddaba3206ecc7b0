"""What a server says about itself, for the record of a test, and how right its reference stage is.

A server of the Open Inference Protocol (Triton, MLServer, …) gives its name and version at /v2. A HawkVision node gives
its policy, its stages and whether its certificates are valid at /v1/targets, and its tasks at /v1/tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.request import ClassifyFields
from hawkvision.client.response import answer_from_json
from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.core.types import Answer, Quality
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import KIND_OF_FORM
from loadgen.clients.engine import ServerAddress, Tally
from loadgen.workload.dataset import Dataset

TIMEOUT_S: Final = 2.0
"""For both together: a server that does not say is tested all the same."""
MAX_BYTES: Final = 256 * 1024
LONGEST: Final = 60
"""Characters of a word that are kept."""
MAX_LISTED: Final = 400
"""Characters of a list of tasks in a message."""


class _Metadata(msgspec.Struct):
    name: str
    version: str = ""


class _Targets(msgspec.Struct):
    policy: str
    edge: dict[str, Any]
    best: dict[str, Any]
    certificates_valid: bool

    def stages(self) -> str:
        """The names of the edge stage and of the reference stage."""
        edge, best = (str(stage.get("variant", "unknown"))[:LONGEST] for stage in (self.edge, self.best))
        return f"{edge} before {best}"


class _ListedTask(msgspec.Struct):
    task: str
    kind: str | None = None


ReplyT = TypeVar("ReplyT")


async def check_task(server: ServerAddress, kind: str | None) -> None:
    """Refuse a test of a task that the server does not list, or lists as one of another kind.

    A server that lists no tasks is tested all the same.

    Args:
        server: where requests go, and the task that they name.
        kind: of the task as its manifest here says; None if there is none.

    Raises:
        ConfigError: naming the tasks that the server lists.
    """
    async with _session(server) as session:
        body = await _fetch(session, f"{server.url.rstrip('/')}/v1/tasks", dict[str, list[_ListedTask]])
    listed = [] if body is None else body.get("tasks", [])
    if not listed:
        return
    served = ", ".join(f"{each.task!r} ({each.kind})" for each in listed)[:MAX_LISTED]
    typed = KIND_OF_FORM.get(server.path)
    if server.task is not None:
        found = next((each for each in listed if each.task == server.task), None)
    else:
        found = next((each for each in listed if typed in (None, each.kind)), None)
    if found is None:
        raise ConfigError(f"--task {server.task or 'is not given'}: expected one that {server.url} serves: {served}")
    if kind is not None and found.kind not in (None, kind):
        raise ConfigError(
            f"--task {server.task or 'is not given'}: {found.task!r} is of kind {found.kind!r} at {server.url}, and "
            f"the labels here are of kind {kind!r}"
        )


async def identify(server: ServerAddress) -> str:
    """Such as `hawkvision 0.2.0, policy hawkvision, efficientnet_lite0_int8 before reference`; what is not said is
    left out, and of a server that says nothing it is empty.
    """
    query = "" if server.task is None else f"?{urlencode({'task': server.task})}"
    async with _session(server) as session:
        about, targets = await asyncio.gather(
            _fetch(session, f"{server.url.rstrip('/')}/v2", _Metadata),
            _fetch(session, f"{server.url.rstrip('/')}/v1/targets{query}", _Targets),
        )
    words = []
    if about is not None:
        words.append(f"{about.name[:LONGEST]} {about.version[:LONGEST]}".strip())
    if targets is not None:
        words.append(f"policy {targets.policy[:LONGEST]}")
        words.append(targets.stages())
        words += ["certificates not valid"] * (not targets.certificates_valid)
    return ", ".join(words)


def _session(server: ServerAddress) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=headers)


async def _fetch(session: aiohttp.ClientSession, url: str, kind: type[ReplyT]) -> ReplyT | None:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return None
            payload = b""
            while len(payload) < MAX_BYTES and (piece := await response.content.read(MAX_BYTES - len(payload))):
                payload += piece
        return msgspec.json.decode(payload, type=kind)
    except (TimeoutError, OSError, aiohttp.ClientError, msgspec.DecodeError, UnicodeDecodeError):
        return None


CALLERS: Final = 4
RETRY_S: Final = 10.0
WAITS_S: Final = (0.5, 1.0, 2.0)
"""Before an image is sent again that another stage answered: a link has bad moments."""


async def ask_reference(
    dataset: Dataset, server: ServerAddress, positions: Sequence[int], show: Callable[[Tally], None]
) -> dict[int, float | bool]:
    """How right the reference stage is, by image number, for the labelled images at `positions` of a data set.

    Each image is asked for once, and again where another stage answered. `show` is called after each answer.

    Raises:
        HawkVisionError: if an image is still refused, or unanswered, after `RETRY_S` of waiting.
        NotReady: if the reference stage does not answer an image, however often it is asked.
    """
    labels, spec = dataset.labels, dataset.kind
    assert labels is not None
    assert spec is not None
    kind, right = spec.open(), dict[int, float | bool]()
    waiting = iter(positions)

    async def caller(client: AsyncClient) -> None:
        for position in waiting:
            answer = await _reference_answer(client, dataset.bodies[position], server, kind)
            right[dataset.numbers[position]] = 1.0 - kind.loss(answer.prediction, labels[position])
            show(Tally(len(right), len(right), 0))

    async with AsyncClient(server.url, api_key=server.api_key, connections=CALLERS, retry_budget_s=RETRY_S) as client:
        try:
            async with asyncio.TaskGroup() as callers:
                for _ in range(CALLERS):
                    callers.create_task(caller(client))
        except* HawkVisionError as group:
            first = group.exceptions[0]
            if isinstance(first, HawkVisionError):
                first.add_note("while asking for the reference, quality=best")
            raise first from None
    return right


async def _reference_answer(client: AsyncClient, body: bytes, server: ServerAddress, kind: TaskKind[Any]) -> Answer:
    """The reference stage's own answer: a `degraded` one comes from another stage."""
    for wait_s in (*WAITS_S, None):
        fields = ClassifyFields(task=server.task, quality=Quality.BEST)
        answer = answer_from_json(await client.send(server.path, body, fields), kind.prediction)
        if not answer.degraded:
            return answer
        if wait_s is not None:
            await asyncio.sleep(wait_s)
    raise NotReady(
        f"{answer.model} ({answer.tier.value}) answered below the target, {1 + len(WAITS_S)} times; expected "
        "the reference stage: is the datacenter reached?"
    )
