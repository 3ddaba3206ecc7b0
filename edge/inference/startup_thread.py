"""Runs the slow part of a start on a thread that a stopping node abandons."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from hawkvision.system.subprocess_runner import stop_commands

ENDS_WITHIN_S: Final = 1.0
"""An abandoned load that checks `given_up` or waits for a compiler ends at once; one that reads a model does not."""

LoadedT = TypeVar("LoadedT")


class Loading(Generic[LoadedT]):
    """One load; starts when it is made on a running event loop."""

    def __init__(self, load: Callable[[Future[None]], LoadedT]) -> None:
        """Call `load` on a thread of its own, with a future that is done once the load is abandoned."""
        self.given_up: Future[None] = Future()
        self._done: asyncio.Future[LoadedT | None] = asyncio.get_running_loop().create_future()
        # A daemon: the process ends without it (`left_behind`).
        self._thread = threading.Thread(target=self._run, args=(load,), name="load", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Abandon the load: stop its compilers and its wait for a device, and let `result` return."""
        if not self.given_up.done():
            self.given_up.set_result(None)
            stop_commands()
            self._settle(None, None)

    async def result(self) -> LoadedT | None:
        """The loaded value; None if the load was abandoned.

        Raises:
            HawkVisionError: as `load`.
        """
        return await self._done

    def left_behind(self) -> bool:
        """Whether the abandoned thread still works; the process must then end with `os._exit`."""
        self._thread.join(ENDS_WITHIN_S)
        return self._thread.is_alive()

    def _run(self, load: Callable[[Future[None]], LoadedT]) -> None:
        loop = self._done.get_loop()
        loaded: LoadedT | None = None
        failed: BaseException | None = None
        try:
            loaded = load(self.given_up)
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._settle, loaded, failed)

    def _settle(self, loaded: LoadedT | None, failed: BaseException | None) -> None:
        if self._done.done():
            return
        if failed is not None and not self.given_up.done():
            self._done.set_exception(failed)
        else:
            self._done.set_result(None if self.given_up.done() else loaded)
