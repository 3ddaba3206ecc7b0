"""One image that a caller sends over a link, and the choice among its responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from hawkvision.transport.client.encoding_plan import Image
from hawkvision.transport.protocol.status import Status

StatusAndBody: TypeAlias = tuple[Status, bytes]

NOT_RECEIVED: Final = (Status.EXPIRED, Status.NO_TEMPLATE)
"""The peer did not get the image or its request in time; the same image may succeed next time."""


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """The arguments of `DatagramLink.ask`; times are the loop's."""

    template: bytes
    image: Image
    meta: bytes
    lossless: bool
    deadline: float | None
    until: float
    on_interim: Callable[[bytes], None]


def first_response(done: Iterable[asyncio.Future[StatusAndBody]]) -> StatusAndBody | None:
    """A response among ended tasks other than `NOT_RECEIVED`, preferably `OK`; None if there is none.

    Raises:
        HawkVisionError, TimeoutError: a task's, if none has such a response.
    """
    failed = [each for each in done if each.exception() is not None]
    answers = [each.result() for each in done if each.exception() is None]
    for status, body in sorted(answers, key=lambda answer: answer[0] is not Status.OK):
        if status not in NOT_RECEIVED:
            return status, body
    return failed[0].result() if failed else None
