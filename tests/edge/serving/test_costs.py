"""What images cost, and that nobody pays for others': the worker pool, a node in this process, real nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.inference.worker_pool import WorkerPool
from edge.servers.oip.decoding import InferRequest, Output
from edge.servers.oip.routes import classify_all
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import Answer, OnMiss, Quality, RequestFields
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.system.admission import TooLateToBegin
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.system.memory import MemoryBudget
from tests.edge.bench import SURE, Bench, bench, run
from tests.edge.conftest import Caller, Reply
from tests.fuzz.examples import examples
from tests.images import encoded, flat_png

MB = 2**20
LENGTH = "Inference-Header-Content-Length"


# ------------------------------------------------------------------------------------------------------- the pool


@settings(max_examples=examples(125), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.one_of(st.none(), st.floats(-0.01, 0.02))), max_size=40),
    st.integers(1, 3),
)
def test_every_job_ends_and_memory_is_never_overdrawn(jobs: list[tuple[int, bool, float | None]], threads: int) -> None:
    async def scenario() -> None:
        memory = MemoryBudget(10)
        pool: WorkerPool[Any] = WorkerPool(threads, 100, memory=memory)
        loop = asyncio.get_running_loop()
        futures = [
            pool.submit(
                lambda: None,
                None if due_s is None else loop.time() + due_s,
                lambda runs: [None] * len(runs),
                DecodingCost(size, heavy=is_heavy),
            )
            for size, is_heavy, due_s in jobs
        ]
        for number, future in enumerate(futures):
            if number % 7 == 3:
                future.cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 30)
        assert {type(each) for each in outcomes} <= {tuple, TooLateToBegin, asyncio.CancelledError}
        await asyncio.to_thread(pool.close)
        assert (memory.in_use, memory.peak <= 10, pool.busy) == (0, True, False)

    run(scenario)


# ------------------------------------------------------------------------------------------------------- a node


def bomb(side: int = 2100) -> bytes:
    """Heavy: 16 bits with alpha."""
    return flat_png(side, side, colour=6, depth=16)


async def infer(it: Bench, *images: bytes, **fields: Any) -> list[Answer]:
    """A request of several images, as the Open Inference Protocol's server gives it to the node."""
    asked = InferRequest("", images, RequestFields(target=Quality.FAST, **fields), (Output("index", binary=False),))

    async def stays() -> None:
        await asyncio.Event().wait()

    return await classify_all(it.node, asked, it.clock.now(), start_trace(), stays, "127.0.0.1")


def test_a_small_image_that_is_late_is_still_answered() -> None:
    async def scenario() -> Answer:
        async with bench(None, SURE) as it:
            return await it.ask(target=Quality.FAST, deadline_ms=0.001, on_miss=OnMiss.DEGRADE)

    assert run(scenario).deadline_met is False


def test_others_wait_for_one_image_of_a_large_request_and_not_for_all() -> None:
    async def scenario() -> tuple[int, int, int]:
        async with bench(None, SURE, max_pixels=20_000_000) as it:
            ended = 0
            submit = it.node.pool.submit

            def counted(run: Callable[[], Any], deadline: Any, together: Any, cost: DecodingCost, *more: Any) -> Any:
                future = submit(run, deadline, together, cost, *more)

                def count(_: object) -> None:
                    nonlocal ended
                    ended += cost.heavy

                future.add_done_callback(count)
                return future

            it.node.pool.submit = counted  # type: ignore[assignment]
            attack = asyncio.create_task(infer(it, *[bomb()] * 8))
            worst = asked = 0
            while not attack.done():
                before = ended
                await it.ask(target=Quality.FAST)
                worst, asked = max(worst, ended - before), asked + 1
            assert len(await attack) == 8
            return worst, asked, it.node.limits.memory.peak

    worst, asked, peak = run(scenario)
    assert worst <= 1  # one worker: the one that is being decoded
    assert asked >= 8  # one goes between any two
    assert peak < 2 * 16 * 2100 * 2100  # never two of its rasters


# ------------------------------------------------------------------------------------------------- real nodes


def status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def value(page: str, name: str, label: str = "") -> float:
    """Of a metric of the task on a page for Prometheus."""
    series = f'hawkvision_{name}{{{label}task="imagenet"}} '
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(series))


def send_many(server: ServerProcess, images: list[bytes]) -> Reply:
    data = b"".join(struct.pack("<I", len(image)) + image for image in images)
    tensor = {"name": "image", "shape": [len(images), 1], "datatype": "BYTES"}
    head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}], "parameters": {"quality": "fast"}}
    text = json.dumps(head).encode()
    caller = Caller(server)
    try:
        return caller.send("POST", "/v2/models/imagenet/infer", text + data, {LENGTH: str(len(text))})
    finally:
        caller.close()


def attacked(server: ServerProcess) -> tuple[list[int], list[int], list[int]]:
    """Statuses of large requests, of single large images, and of small images that others send meanwhile."""
    many = [[flat_png(6900, 6900)] * 32, [flat_png(4000, 4000)] * 32, [flat_png(2400, 2400)] * 4, [bomb(1200)] * 8]
    single = [flat_png(6900, 6900), flat_png(4096, 4096), bomb(1900), flat_png(3000, 3000, 6, interlaced=True)] * 3

    def one(body: bytes) -> int:
        caller = Caller(server)
        try:
            return caller.classify(body, "quality=fast").status
        finally:
            caller.close()

    with ThreadPoolExecutor(8) as threads:
        large = [threads.submit(send_many, server, images) for images in many]
        alone = [threads.submit(one, body) for body in single]
        small: list[int] = []
        while not (all(each.done() for each in large) and all(each.done() for each in alone)):
            small.append(one(encoded()))
        return [each.result().status for each in large], [each.result() for each in alone], small


@pytest.mark.slow
def test_a_node_keeps_within_the_memory_that_it_was_given_and_serves_others_meanwhile() -> None:
    given = 160 * MB
    with running("edge", "--port", "0", "--backend", "noop", "--memory-bytes", str(given)) as node:
        Caller(node).classify(encoded(), "quality=fast")
        before = status_bytes(node.pid, "VmRSS")
        large, alone, small = attacked(node)
        peak, after = status_bytes(node.pid, "VmHWM"), status_bytes(node.pid, "VmRSS")
        page = Caller(node).get("/metrics").body.decode()
    assert large[:2] == [413, 413]  # too many pixels each; too many together, or more bytes than one may have
    assert large[2:] == [200, 200]
    assert set(alone) == {200, 413}
    assert alone[0] == 413
    assert alone[3] == 413  # 72 MB; 60 are half of three quarters of what was given
    assert small
    assert set(small) == {200}
    assert peak - before <= given
    assert after - before <= given / 4  # it went back
    assert value(page, "memory_budget_bytes", 'part="total",') == given
    assert value(page, "decoding_bytes") == value(page, "bodies_bytes") == 0
    assert 0 < value(page, "decoding_peak_bytes") <= value(page, "memory_budget_bytes", 'part="decoding",')
    assert value(page, "refused_costs_total") >= 1


@contextlib.contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A group of processes that may use so much memory; skips where we may make none."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    top, name = (v1, "memory.limit_in_bytes") if (v1 / "cgroup.procs").exists() else (v2, "memory.max")
    group = top / f"hawkvision-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.slow
def test_a_node_in_a_control_group_finds_its_limit_and_is_not_killed_for_it() -> None:
    limit = 320 * MB
    with control_group(limit) as group:
        into = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        with running("edge", "--port", "0", "--backend", "noop", prefix=into) as node:
            page = Caller(node).get("/metrics").body.decode()
            line = next(
                each for each in page.splitlines() if each.startswith('hawkvision_memory_budget_bytes{part="tot')
            )
            assert 0 < float(line.split()[1]) < limit - status_bytes(node.pid, "VmRSS") / 2
            _, alone, small = attacked(node)
            assert set(alone) <= {200, 413, 429}
            assert set(small) == {200}
            assert status_bytes(node.pid, "VmHWM") < limit
            assert node.process.poll() is None
