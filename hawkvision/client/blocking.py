"""The client of an edge node for programs without an event loop; see `hawkvision.client`.

`Client` runs an `AsyncClient` on an event loop of its own thread. A fork copies the loop and its sockets, but not its
thread, and both processes share one epoll instance. So the child must neither use nor close what it inherited: it
starts a new loop and keeps the old one untouched.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from typing import Any, Final, TypeVar, Unpack

from hawkvision.client.asynchronous import AsyncClient, ClientOptions, Health
from hawkvision.client.batch import Outcome
from hawkvision.client.request import ClassifyFields, Image
from hawkvision.core.types import Answer

ResultT = TypeVar("ResultT")

_INHERITED: Final[list[object]] = []
"""Loops of the parent process, kept because collecting one would close it."""
_starting = threading.Lock()


def _after_fork() -> None:
    """Replace the lock, which a thread of the parent may have held."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Client:
    """`AsyncClient` for code without an event loop; safe to call from several threads, and after a fork."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        """See `AsyncClient`."""
        self._async = AsyncClient(url, **options)
        self.url = self._async.url
        self._loop = BackgroundLoop(f"the client of {self.url}")

    def infer(self, image: Image, **fields: Unpack[ClassifyFields]) -> Answer:
        """See `AsyncClient.infer`."""
        return self._loop.run(self._async.infer(image, **fields))

    def classify(self, image: Image, **fields: Unpack[ClassifyFields]) -> Answer:
        """See `AsyncClient.classify`."""
        return self._loop.run(self._async.classify(image, **fields))

    def detect(self, image: Image, **fields: Unpack[ClassifyFields]) -> Answer:
        """See `AsyncClient.detect`."""
        return self._loop.run(self._async.detect(image, **fields))

    def infer_batch(
        self, images: Iterable[Image], *, concurrency: int = 8, **fields: Unpack[ClassifyFields]
    ) -> Generator[Outcome]:
        """See `AsyncClient.infer_batch`. The iterable is read on the client's own thread."""
        return self._loop.iterate(self._async.infer_batch(images, concurrency=concurrency, **fields))

    def classify_batch(
        self, images: Iterable[Image], *, concurrency: int = 8, **fields: Unpack[ClassifyFields]
    ) -> Generator[Outcome]:
        """See `AsyncClient.classify_batch`. The iterable is read on the client's own thread."""
        return self._loop.iterate(self._async.classify_batch(images, concurrency=concurrency, **fields))

    def detect_batch(
        self, images: Iterable[Image], *, concurrency: int = 8, **fields: Unpack[ClassifyFields]
    ) -> Generator[Outcome]:
        """See `AsyncClient.detect_batch`. The iterable is read on the client's own thread."""
        return self._loop.iterate(self._async.detect_batch(images, concurrency=concurrency, **fields))

    def tasks(self) -> dict[str, Any]:
        """See `AsyncClient.tasks`."""
        return self._loop.run(self._async.tasks())

    def targets(self, task: str | None = None) -> dict[str, Any]:
        """See `AsyncClient.targets`."""
        return self._loop.run(self._async.targets(task))

    def status(self) -> dict[str, Any]:
        """See `AsyncClient.status`."""
        return self._loop.run(self._async.status())

    def watch_status(self) -> Generator[dict[str, Any]]:
        """See `AsyncClient.watch_status`."""
        return self._loop.iterate(self._async.watch_status())

    def certify(self, task: str | None = None, *, labels_checked: bool = False) -> dict[str, Any]:
        """See `AsyncClient.certify`."""
        return self._loop.run(self._async.certify(task, labels_checked=labels_checked))

    def compare(self, image: bytes, task: str | None = None) -> dict[str, Any]:
        """See `AsyncClient.compare`."""
        return self._loop.run(self._async.compare(image, task))

    def health(self) -> Health:
        """See `AsyncClient.health`."""
        return self._loop.run(self._async.health())

    def wait_ready(self, timeout_s: float = 60.0) -> Health:
        """See `AsyncClient.wait_ready`."""
        return self._loop.run(self._async.wait_ready(timeout_s))

    def close(self) -> None:
        """Close the connections and end the thread. Pending calls are cancelled; a second call does nothing."""
        self._loop.close(self._async.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BackgroundLoop:
    """Runs coroutines for threads that wait for them."""

    def __init__(self, owner: str) -> None:
        """Start.

        Args:
            owner: name of the loop's user in errors.
        """
        self._owner = owner
        self._closed = False
        self._start()

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of a coroutine.

        Raises:
            RuntimeError: if the loop is closed, before or meanwhile.
            Exception: what the coroutine raises.
        """
        try:
            loop = self._here()
        except RuntimeError:
            call.close()
            raise
        future = asyncio.run_coroutine_threadsafe(call, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(f"{self._owner} was closed during a call") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[ResultT]) -> Generator[ResultT]:
        """The items of an asynchronous generator, which is closed with this one."""

        async def following() -> tuple[ResultT] | None:
            async for item in items:
                return (item,)
            return None

        async def close() -> None:
            await items.aclose()

        try:
            while (found := self.run(following())) is not None:
                yield found[0]
        finally:
            if not self._closed:
                self.run(close())

    def close(self, first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `first`, cancel pending calls, and end the thread. A second call does nothing."""
        self._settle()
        with self._closing:
            if self._closed:
                return

            async def shut_down() -> None:
                await first()
                others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)

            asyncio.run_coroutine_threadsafe(shut_down(), self._loop).result()
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _here(self) -> asyncio.AbstractEventLoop:
        """The loop of this process.

        Raises:
            RuntimeError: if it is closed.
        """
        self._settle()
        if self._closed:
            raise RuntimeError(f"{self._owner} is closed")
        return self._loop

    def _settle(self) -> None:
        """Start a new loop if this process is a forked child."""
        if self._pid != os.getpid() and not self._closed:
            with _starting:
                if self._pid != os.getpid():
                    _INHERITED.append((self._loop, self._thread))
                    self._start()

    def _start(self) -> None:
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a program that forgot `close` can still end.
        self._thread = threading.Thread(target=self._loop.run_forever, name="hawkvision-client", daemon=True)
        self._thread.start()
        self._pid = os.getpid()
