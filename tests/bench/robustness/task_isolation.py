"""`python -m tests.bench.robustness.task_isolation`: does a flood of one task on an edge node harm another task there?

One edge node without a datacenter serves two tasks. The second one gets a steady stream of requests on a schedule; the
first one is asked by many callers at once in every second round. For the steady task: P50 and P99 from the due time,
and requests that were not answered. For both: what was refused. Worst and best of the rounds are given, and the node's
memory with the first task alone, with both, and after the floods.
"""

from __future__ import annotations

import argparse
import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import cv2
import numpy as np
from rich.console import Console

from hawkvision.system.child_server import ServerProcess, running

TASKS: Final = ("imagenet", "cifar10")
"""The one that is flooded, and the steady one."""
SIDES: Final = (224, 32)
CALLERS: Final = 64
TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Answers:
    """Statuses, and milliseconds of the answered requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    ms: list[float] = field(default_factory=list)

    def record(self, status: int, ms: float) -> None:
        """Note one reply."""
        self.statuses[status] += 1
        if status == 200:
            self.ms.append(ms)

    def shown(self) -> str:
        """P50, P99 and statuses."""
        p50, p99 = np.quantile(self.ms, (0.5, 0.99)) if self.ms else (float("nan"), float("nan"))
        return f"P50 {p50:.0f} ms, P99 {p99:.0f} ms, {dict(self.statuses)}"


def images(side: int) -> list[bytes]:
    """Eight JPEGs of noise."""
    draw = np.random.default_rng(0)
    return [cv2.imencode(".jpg", draw.integers(0, 256, (side, side, 3), np.uint8))[1].tobytes() for _ in range(8)]


class Caller:
    """One connection that is kept."""

    def __init__(self, url: str, task: str) -> None:
        where = urlsplit(url)
        self._http = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        self._path = f"/v1/infer?task={task}&quality=fast"

    def ask(self, body: bytes) -> int:
        """The status of one answer."""
        self._http.request("POST", self._path, body, {"Content-Type": "image/jpeg"})
        response = self._http.getresponse()
        response.read()
        return response.status


def steady(url: str, rate: float, seconds: float) -> Answers:
    """Requests of the steady task on a schedule, over as many connections as are needed."""
    found, lock, bodies = Answers(), threading.Lock(), images(SIDES[1])
    idle = [Caller(url, TASKS[1]) for _ in range(16)]

    def ask(due: float, body: bytes) -> None:
        with lock:
            caller = idle.pop() if idle else Caller(url, TASKS[1])
        status = caller.ask(body)
        with lock:
            found.record(status, (time.perf_counter() - due) * 1e3)
            idle.append(caller)

    started = time.perf_counter()
    with ThreadPoolExecutor(64) as pool:
        for number in range(int(rate * seconds)):
            due = started + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            pool.submit(ask, due, bodies[number % len(bodies)])
    return found


@contextmanager
def flood(url: str) -> Iterator[Answers]:
    """Ask the flooded task as fast as `CALLERS` callers can, while the block lasts."""
    found, lock, bodies, over = Answers(), threading.Lock(), images(SIDES[0]), threading.Event()

    def call(number: int) -> None:
        caller = Caller(url, TASKS[0])
        while not over.is_set():
            began = time.perf_counter()
            status = caller.ask(bodies[number % len(bodies)])
            with lock:
                found.record(status, (time.perf_counter() - began) * 1e3)
            if status != 200:
                over.wait(1.0)  # as Retry-After asks

    callers = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
    for each in callers:
        each.start()
    try:
        yield found
    finally:
        over.set()
        for each in callers:
            each.join()


def rss_mb(node: ServerProcess) -> float:
    """Resident memory of the node's process."""
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1e3


def node(tasks: Sequence[str]) -> list[str]:
    """The options of an edge node."""
    return ["--tasks", ",".join(tasks), "--port", "0"]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of both kinds")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second of the steady task")
    given = parser.parse_args()
    console = Console(width=160, highlight=False, markup=False)
    with running("edge", *node(TASKS[:1]), title="an edge node of one task") as one:
        Caller(one.url, TASKS[0]).ask(images(SIDES[0])[0])
        console.print(f"{TASKS[0]} alone: {rss_mb(one):.0f} MB")
    with running("edge", *node(TASKS), title="an edge node of two tasks") as both:
        for task, side in zip(TASKS, SIDES, strict=True):
            Caller(both.url, task).ask(images(side)[0])
        console.print(f"{' and '.join(TASKS)}: {rss_mb(both):.0f} MB")
        for number in range(given.rounds):
            console.print(
                f"round {number + 1}, {TASKS[1]} alone: {steady(both.url, given.rate, given.seconds).shown()}"
            )
            with flood(both.url) as flooded:
                found = steady(both.url, given.rate, given.seconds)
            console.print(f"round {number + 1}, {TASKS[1]} beside a flood: {found.shown()}")
            console.print(f"         {TASKS[0]}, {CALLERS} callers: {flooded.shown()}")
        console.print(f"after the floods: {rss_mb(both):.0f} MB")


if __name__ == "__main__":
    main()
