"""What servers say of themselves is kept, and one that says nothing is tested all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.system.child_server import running
from loadgen.clients.engine import ServerAddress
from loadgen.clients.server_info import MAX_BYTES, check_task, identify
from loadgen.workload.record import load
from tests.loadgen.command import command
from tests.loadgen.scripted import RecordedRequest, reply, scripted

TRITON = b'{"name": "triton", "version": "2.65.0", "extensions": ["binary_tensor_data"]}'
TARGETS = (
    b'{"policy": "static", "edge": {"variant": "small"}, "best": {"variant": "large"}, "certificates_valid": false}'
)


TASKS = (
    b'{"tasks": [{"task": "coco", "kind": "detection", "status": "ready"}, {"task": "pets", "kind": null},'
    b' {"task": "digits", "kind": "classification"}]}'
)


@pytest.mark.parametrize(
    ("task", "path", "kind", "says"),
    [
        ("coco", "/v1/detect", "detection", None),
        (None, "/v1/classify", "classification", None),
        ("pets", "/v1/classify", "classification", None),
        (None, "/v1/infer", "classification", "'coco' is of kind 'detection' at http://.*here are of kind 'classif"),
        (
            "dogs",
            "/v1/classify",
            "classification",
            r"--task dogs: expected one that .*'coco' \(detection\), 'pets' \(None",
        ),
        ("digits", "/v1/infer", "counting", "'digits' is of kind 'classification'"),
        ("coco", "/predict", None, None),
    ],
)
def test_a_task_that_the_server_does_not_serve_is_refused(
    task: str | None, path: str, kind: str | None, says: str | None
) -> None:
    async def say(asked: RecordedRequest) -> bytes:
        return reply(TASKS) if b"/v1/tasks" in asked.line.encode() else reply(b"{}", status=404)

    async def scenario() -> None:
        async with scripted(say) as server:
            await check_task(ServerAddress(server.url, task=task, path=path), kind)

    if says is None:
        asyncio.run(scenario())
        return
    with pytest.raises(ConfigError, match=says):
        asyncio.run(scenario())


def test_a_server_that_lists_no_tasks_is_tested_all_the_same() -> None:
    async def say(_: RecordedRequest) -> bytes:
        return reply(b'{"index": 1}')

    async def scenario() -> None:
        async with scripted(say) as server:
            await check_task(ServerAddress(server.url, task="coco"), "detection")
        await check_task(ServerAddress("http://127.0.0.1:1", task="coco"), "detection")

    asyncio.run(scenario())


def said_by(replies: dict[str, bytes]) -> str:
    async def say(asked: RecordedRequest) -> bytes:
        path = asked.line.split()[1]
        return replies.get(path, reply(b'{"error": "no such path"}', status=404))

    async def scenario() -> str:
        async with scripted(say) as server:
            return await identify(ServerAddress(server.url + "/", api_key="secret"))

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ({"/v2": reply(TRITON)}, "triton 2.65.0"),
        ({"/v2": reply(b'{"name": "own"}')}, "own"),
        ({"/v1/targets": reply(TARGETS)}, "policy static, small before large, certificates not valid"),
        ({"/v2": reply(TRITON, status=401)}, ""),
        ({"/v2": reply(b'{"name": 5}'), "/v1/targets": reply(b"\xff\xfe")}, ""),
        ({"/v2": reply(b'{"name": "' + b"x" * MAX_BYTES + b'"}')}, ""),
        ({"/v2": reply(b'{"name": "' + b"x" * 1000 + b'"}')}, "x" * 60),
    ],
)
def test_what_is_said_is_kept_and_what_is_not_understood_left_out(replies: dict[str, bytes], said: str) -> None:
    assert said_by(replies) == said


def test_a_node_says_its_release_its_policy_and_its_stages_and_the_record_keeps_it(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    with running("edge", "--port", "0", "--backend", "noop", title="the node") as node:
        done = command(
            "run", "--url", node.url, "--no-noise", "--arrivals", "constant:20", "--duration-s", "0.2",
            "--warm-up-s", "0", "--json", str(record),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    release, policy, stages = load(record).server.split(", ")[:3]
    assert release.startswith("hawkvision 0.")
    assert policy == "policy hawkvision"
    assert stages == "efficientnet_lite0_int8 before reference"
