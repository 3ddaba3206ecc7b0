"""One image on its way through a node.

The server makes an `ImageRequest`: what is asked. The node adds how it answers it, a `RoutedImage`, which the edge
stage answers, or the other tier, to which an `EscalationRequest` goes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from edge.inference.edge_stage import EdgeStage
from edge.inference.job_queue import Place
from hawkvision.cascade.route import Route
from hawkvision.core.clock import Deadline
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import WHOLE, Quality, Received, RequestFields
from hawkvision.guarantee.monitor import Watched
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import probe
from hawkvision.models.fingerprints import CertifiedVersions


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """One image and what its caller asks about it. A server makes it; every step gets the same one."""

    body: bytes
    """The encoded image, as it was received."""
    asked: RequestFields
    started: float
    """Clock time of the first byte."""
    trace: TraceContext
    """The request's span; the datacenter gets a child."""
    caller: str = ""
    """Whose evidence this is: `KEY` and the name of its API key, or its address."""
    received: Received = WHOLE
    """The part of the caller's image that `body` is."""
    hang_up: Callable[[], Awaitable[object]] | None = None
    """Returns when the caller is gone; awaited only while the datacenter is."""
    place: Place | None = None
    """In the worker pool, if the server has reserved one; the server releases it."""

    @cached_property
    def header(self) -> ImageHeader:
        """The image's header.

        Raises:
            RequestError: if there is none that can be read.
        """
        return probe(self.body)

    @cached_property
    def deadline(self) -> Deadline | None:
        """When the answer must leave; None without a bound."""
        within_ms = self.asked.deadline_ms
        return None if within_ms is None else Deadline.after_ms(within_ms, self.started)

    @property
    def promised(self) -> float | None:
        """See `RequestFields.promised`."""
        return self.asked.promised(self.started)


@dataclass(slots=True, eq=False)
class RoutedImage:
    """A request with its route, and the certificates that were in force when it came."""

    request: ImageRequest
    route: Route
    watched: Watched
    """The logs that watch it."""
    stage: EdgeStage
    versions: CertifiedVersions
    cost: DecodingCost
    """Of decoding the image at the edge."""
    declined_before: bool = False
    """Whether the edge stage has run on a smaller part of the image and its answer was not accepted."""
    reported: bool = False
    """Whether its outcome was offered to the auditor, which happens once."""

    @property
    def suspended(self) -> bool:
        """Whether the reference stage must answer because an alarm stands; `fast` asks for the edge's answer alone."""
        return self.watched.suspended and self.request.asked.target is not Quality.FAST
