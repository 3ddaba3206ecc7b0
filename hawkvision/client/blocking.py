"""The client of an edge node for programs without an event loop; see `hawkvision.client`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from hawkvision.client.asynchronous import LATE_S, AsyncClient, Health, Transport
from hawkvision.client.batch import Outcome
from hawkvision.client.loop import BackgroundLoop
from hawkvision.client.request import ClassifyFields, Color, Encoding, Image
from hawkvision.core.types import Answer


class Client:
    """`AsyncClient` for code without an event loop; safe to call from several threads, and after a fork."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        late_s: float = LATE_S,
        connections: int = 16,
        retry_budget_s: float = 0.0,
        transport: Transport = "http",
        paths: Sequence[str] = (),
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        certificate_key: str | Path | None = None,
    ) -> None:
        """See `AsyncClient`."""
        self._async = AsyncClient(
            url,
            api_key=api_key,
            timeout_s=timeout_s,
            late_s=late_s,
            connections=connections,
            retry_budget_s=retry_budget_s,
            transport=transport,
            paths=paths,
            ca=ca,
            certificate=certificate,
            certificate_key=certificate_key,
        )
        self.url = self._async.url
        self._loop = BackgroundLoop(f"the client of {self.url}")

    def infer(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """See `AsyncClient.infer`."""
        return self._loop.run(self._async.infer(image, encoding=encoding, color=color, **fields))

    def classify(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """See `AsyncClient.classify`."""
        return self._loop.run(self._async.classify(image, encoding=encoding, color=color, **fields))

    def detect(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """See `AsyncClient.detect`."""
        return self._loop.run(self._async.detect(image, encoding=encoding, color=color, **fields))

    def infer_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Generator[Outcome]:
        """See `AsyncClient.infer_batch`. The iterable is read on the client's own thread."""
        outcomes = self._async.infer_batch(images, concurrency=concurrency, encoding=encoding, color=color, **fields)
        return self._loop.iterate(outcomes)

    def classify_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Generator[Outcome]:
        """See `AsyncClient.classify_batch`. The iterable is read on the client's own thread."""
        outcomes = self._async.classify_batch(images, concurrency=concurrency, encoding=encoding, color=color, **fields)
        return self._loop.iterate(outcomes)

    def detect_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Generator[Outcome]:
        """See `AsyncClient.detect_batch`. The iterable is read on the client's own thread."""
        outcomes = self._async.detect_batch(images, concurrency=concurrency, encoding=encoding, color=color, **fields)
        return self._loop.iterate(outcomes)

    def tasks(self) -> dict[str, Any]:
        """See `AsyncClient.tasks`."""
        return self._loop.run(self._async.tasks())

    def targets(self, task: str | None = None) -> dict[str, Any]:
        """See `AsyncClient.targets`."""
        return self._loop.run(self._async.targets(task))

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
