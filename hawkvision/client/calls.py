"""The calls of a client that send images: for tasks of any kind, and their typed forms."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol, Unpack

from hawkvision.client.batch import Outcome, in_order
from hawkvision.client.request import (
    ClassifyFields,
    Color,
    Encoding,
    Image,
    PixelFormat,
    query_fields,
    waits_beyond_deadline,
)
from hawkvision.client.response import answer_from_json
from hawkvision.core.errors import HawkVisionError, ManifestError
from hawkvision.core.types import Answer, Prediction
from hawkvision.tasks.registry import CLASSIFY_PATH, DETECT_PATH, INFER_PATH, KIND_OF_FORM, kind_class


class Call(Protocol):
    """One of the calls of `ImageCalls` for a single image."""

    def __call__(
        self, image: Image, *, encoding: Encoding | None, color: Color | None, **fields: Unpack[ClassifyFields]
    ) -> Awaitable[Answer]:
        """See `ImageCalls.infer`."""
        ...


class ImageCalls(ABC):
    """What a client needs beyond `send` and `tasks` to ask about images."""

    _kinds: dict[str, str | None] | None = None
    """The kind of each task that the node served when it was asked; None until it has been."""

    @abstractmethod
    async def send(self, path: str, image: Image, form: PixelFormat, fields: ClassifyFields) -> dict[str, Any]:
        """The JSON of the answer to one image."""

    @abstractmethod
    async def tasks(self) -> dict[str, Any]:
        """The reply to `GET /v1/tasks`."""

    async def infer(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """The answer to one image, by a task of any kind.

        `answer.prediction` has the type of the task's kind, or is an `OtherPrediction` if that is not known here. The
        first call also asks the node for the kinds of its tasks, over HTTP.

        Args:
            image: an encoded image or its path, sent byte for byte; or uint8 pixels.
            encoding: how to encode pixels: `png` is lossless and the default over HTTP; `jpeg` takes a tenth of the
                bytes. The datagram transport encodes pixels as the link allows, unless an encoding is given.
            color: channel order of pixels: `rgb`, the default, or `bgr`, as in OpenCV.
            fields: the task, the target and further fields of the request.

        Raises:
            BadField: for contradictory fields, before anything is sent.
            RequestError, ServiceError: as the node reports; see `hawkvision.client` for those that arise here. The
                datagram transport refuses a broken image before it is sent.
            DeadlineMissed: if no answer arrived `late_s` after the deadline.
            OSError: if the path cannot be read.
        """
        query_fields(**fields)
        form = PixelFormat(encoding, color)
        form.check(image)
        listing = asyncio.create_task(self._kinds_of_tasks())
        deadline_ms = None if waits_beyond_deadline(fields) else fields.get("deadline_ms")
        until = None if deadline_ms is None else asyncio.get_running_loop().time() + deadline_ms / 1e3
        kind: str | None = None
        try:
            answered = await self.send(INFER_PATH, image, form, fields)
            task = str(answered.get("task"))
            with suppress(TimeoutError):  # an answer is not kept back beyond its deadline for its type
                async with asyncio.timeout_at(until):
                    kinds = await listing
                    if task not in kinds and self._kinds is not None:
                        kinds = await self._listed_anew(task)
                    kind = kinds.get(task)
        finally:
            listing.cancel()
        return answer_from_json(answered, _prediction(kind))

    async def classify(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """Classify one image, by the first task of that kind or the one that is named. See `infer`."""
        return await self._typed(CLASSIFY_PATH, image, PixelFormat(encoding, color), fields)

    async def detect(
        self,
        image: Image,
        *,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> Answer:
        """Find the objects in one image: `answer.prediction.objects`. See `infer`."""
        return await self._typed(DETECT_PATH, image, PixelFormat(encoding, color), fields)

    def infer_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> AsyncGenerator[Outcome]:
        """As `infer` for any number of images; yields the outcomes in their order.

        An error of one image is its outcome; the other images are answered all the same.

        Args:
            images: each as `infer` takes it; read from the iterable when there is room.
            concurrency: images in flight at once. Up to `AHEAD` (`hawkvision.client.batch`) times as many finished
                ones wait for an earlier one.
            encoding: see `infer`.
            color: see `infer`.
            fields: see `infer`; the same for all images.

        Raises:
            BadField: for contradictory fields, before anything is sent.
        """
        return _batch(self.infer, images, concurrency, PixelFormat(encoding, color), fields)

    def classify_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> AsyncGenerator[Outcome]:
        """As `classify` for any number of images; see `infer_batch`."""
        return _batch(self.classify, images, concurrency, PixelFormat(encoding, color), fields)

    def detect_batch(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 8,
        encoding: Encoding | None = None,
        color: Color | None = None,
        **fields: Unpack[ClassifyFields],
    ) -> AsyncGenerator[Outcome]:
        """As `detect` for any number of images; see `infer_batch`."""
        return _batch(self.detect, images, concurrency, PixelFormat(encoding, color), fields)

    async def _typed(self, path: str, image: Image, form: PixelFormat, fields: ClassifyFields) -> Answer:
        query_fields(**fields)
        form.check(image)
        kind = KIND_OF_FORM[path]
        return answer_from_json(await self.send(path, image, form, fields), _prediction(kind))

    async def _kinds_of_tasks(self) -> dict[str, str | None]:
        """The kind of each task of the node; empty if it does not say."""
        if self._kinds is None:
            try:
                listed = (await self.tasks()).get("tasks", [])
                self._kinds = {each["task"]: each.get("kind") for each in listed}
            except (HawkVisionError, TypeError, KeyError, AttributeError):
                return {}  # it cannot be asked now
        return self._kinds

    async def _listed_anew(self, task: str) -> dict[str, str | None]:
        """The kinds once more, for a task that was not listed: the node may have been started anew since."""
        self._kinds = None
        kinds = await self._kinds_of_tasks()
        kinds.setdefault(task, None)  # the node is not asked about it again
        return kinds


async def _batch(
    call: Call, images: Iterable[Image], concurrency: int, form: PixelFormat, fields: ClassifyFields
) -> AsyncGenerator[Outcome]:
    query_fields(**fields)
    each: Callable[[Image], Awaitable[Answer]] = partial(call, encoding=form.encoding, color=form.color, **fields)
    async with aclosing(in_order(images, each, concurrency)) as outcomes:
        async for outcome in outcomes:
            yield outcome


def _prediction(kind: str | None) -> type[Prediction] | None:
    """The type of predictions of a kind; None if it is not installed."""
    if kind is None:
        return None
    try:
        found: type[Prediction] = kind_class(kind).prediction
    except ManifestError:
        return None
    return found
