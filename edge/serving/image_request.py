"""One image on its way through a node: the bytes, what the caller asks, and what was decided on arrival."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge.inference.admission import Admitted, Turns
from edge.inference.edge_stage import EdgeStage
from edge.monitoring.request_streams import StreamControllers
from hawkvision.cascade.certified_fingerprints import CertifiedVersions
from hawkvision.cascade.route import Route
from hawkvision.core.clock import Deadline
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import ClassifyRequest, OnMiss, Received
from hawkvision.imaging.decoding_cost import DecodingCost
from hawkvision.imaging.image_header import ImageHeader


@dataclass(slots=True, eq=False)
class ImageRequest:
    """The context of one image; every step of a request gets it."""

    body: bytes
    """The encoded image, as it was received."""
    header: ImageHeader
    cost: DecodingCost
    """Expected cost of decoding it at the edge."""
    asked: ClassifyRequest
    on_miss: OnMiss
    route: Route
    controllers: StreamControllers
    """Of its streams."""
    stage: EdgeStage
    """The edge stage, with the certificates in force on arrival."""
    versions: CertifiedVersions
    """The certified versions in force on arrival."""
    reference: str
    """The datacenter stage that is asked, unless an intermediate stage answers."""
    started: float
    """Clock time of the first byte."""
    deadline: Deadline | None
    trace: TraceContext
    """The request's span; the datacenter gets a child."""
    hang_up: Callable[[], Awaitable[object]] | None
    """Returns when the caller is gone."""
    received: Received
    """The part of the caller's image that `body` is."""
    turns: Turns | None = None
    """Of a request that has several images."""
    declined_before: bool = False
    """Whether the edge stage has looked at a smaller part of the image and its answer was not accepted."""
    admitted: Admitted | None = None
    """Its part of the work that waits, if it is heavy."""

    def slack_ms(self, now: float) -> float | None:
        """Milliseconds before the deadline; None without one."""
        return None if self.deadline is None else self.deadline.remaining_ms(now)
