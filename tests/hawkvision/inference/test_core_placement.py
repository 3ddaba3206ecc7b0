"""Threads that work beside one another are kept off the processors on which the others are at work."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import pytest

from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.backends.intra_op_threads import processor
from hawkvision.inference.core_placement import MOST, CorePlacement, PlaceableThreads
from tests.processors import confined_to_one

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="there is one core only")

LIMIT_S = 60.0


class Work:
    """Lasts until it is told to end."""

    def __init__(self) -> None:
        self.thread = self.core = -1
        self.began, self._end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        assert processor is not None
        self.thread, self.core = threading.get_native_id(), processor()
        self.began.set()
        assert self._end.wait(LIMIT_S)

    def end(self) -> None:
        self._end.set()


@contextmanager
def at_work(threads: PlaceableThreads, number: int) -> Iterator[list[Work]]:
    """So many are at work, begun one after another."""
    works = [Work() for _ in range(number)]
    futures: list[Future[None]] = []
    for work in works:
        futures.append(threads.submit(work))
        assert work.began.wait(LIMIT_S)
    yield works
    for work in works:
        work.end()
    for future in futures:
        future.result(LIMIT_S)


@contextmanager
def joined(apart: CorePlacement) -> Iterator[int]:
    """A thread of its own that has joined and has nothing to do; its id."""
    up, end = threading.Barrier(2), threading.Event()

    def live() -> None:
        apart.join()
        up.wait(LIMIT_S)
        assert end.wait(LIMIT_S)

    thread = threading.Thread(target=live)
    thread.start()
    up.wait(LIMIT_S)
    assert thread.native_id is not None
    yield thread.native_id
    end.set()
    thread.join(LIMIT_S)


def everywhere() -> set[int]:
    return os.sched_getaffinity(0)


def test_who_begins_second_works_elsewhere() -> None:
    threads = PlaceableThreads(2, "apart", CorePlacement())
    for _ in range(20):
        with at_work(threads, 2) as (first, second):
            assert second.core != first.core
            assert os.sched_getaffinity(second.thread) == everywhere() - {first.core}


def test_who_has_nothing_to_do_may_run_where_nobody_is_at_work() -> None:
    apart = CorePlacement()
    with joined(apart) as idle:
        assert os.sched_getaffinity(idle) == everywhere()
        with at_work(PlaceableThreads(1, "apart", apart), 1) as (work,):
            assert os.sched_getaffinity(idle) == everywhere() - {work.core}
        assert os.sched_getaffinity(idle) == everywhere()


def test_threads_that_outnumber_the_processors_may_run_on_all() -> None:
    threads = PlaceableThreads(usable_cores() + 1, "apart", CorePlacement())
    with at_work(threads, usable_cores() + 1) as works:
        assert {work.core for work in works[:-1]} == everywhere()
        assert os.sched_getaffinity(works[-1].thread) == everywhere()


def test_where_a_thread_cannot_be_moved_work_goes_on_and_all_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    apart = CorePlacement()
    threads = PlaceableThreads(2, "apart", apart)
    with at_work(threads, 2) as (first, second):
        pass
    with joined(apart):
        pass  # it has ended, and cannot be moved
    with caplog.at_level(logging.WARNING, "hawkvision.inference"), at_work(threads, 2):
        for thread in (first.thread, second.thread):
            assert os.sched_getaffinity(thread) == everywhere()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "threads that work beside one another can no longer be kept apart"
    ]


def test_threads_confined_to_one_processor_stay_there() -> None:
    first = min(everywhere())
    with confined_to_one(), at_work(PlaceableThreads(2, "apart", CorePlacement()), 2) as works:
        for work in works:
            assert os.sched_getaffinity(work.thread) == {first}


def test_more_threads_than_can_be_worth_it_are_left_alone() -> None:
    apart = CorePlacement()
    with ExitStack() as stack:
        threads = [stack.enter_context(joined(apart)) for _ in range(MOST + 1)]
        with at_work(PlaceableThreads(1, "late", apart), 1):
            assert all(os.sched_getaffinity(thread) == everywhere() for thread in threads)
