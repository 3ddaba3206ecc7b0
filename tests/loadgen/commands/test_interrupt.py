"""Ctrl-C: the first is heeded, the second obeyed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from loadgen.commands.interrupt import first_interrupt, run_unless


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_sets_the_event_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    async def scenario() -> bool:
        with first_interrupt() as stop:
            os.kill(os.getpid(), number)
            await stop.wait()
            return stop.is_set()

    assert asyncio.run(scenario())
    assert signal.getsignal(number) is before


def test_second_interrupt_ends_even_what_never_gives_the_loop_a_turn() -> None:
    async def scenario() -> None:
        with first_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())


def test_work_is_cancelled_and_cleans_up_when_the_event_is_set() -> None:
    cleaned: list[bool] = []

    async def work(stop: asyncio.Event) -> int:
        try:
            stop.set()
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)
        return 1

    async def scenario() -> int | None:
        stop = asyncio.Event()
        return await run_unless(stop, work(stop))

    assert asyncio.run(scenario()) is None
    assert cleaned == [True]
