"""The hop from an edge node to the datacenter tier: what travels on the wire, and nothing else.

    POST /v1/infer
        X-HawkVision-Task: imagenet            default: the tier's own task
        X-HawkVision-Variant: committee        a rung of the ladder; default: the best served
        X-HawkVision-Deadline-Ms: 180.0        time left when sent; absent: none
        X-HawkVision-Top-K: 5
        traceparent: 00-…                      W3C trace context
        Authorization: Bearer KEY              when the tier has a key
        <the caller's own encoded picture, never re-encoded>

    200 {"top_k": [{"index": 281, "confidence": 0.83}, …], "model": "committee",
         "timing_ms": {"decode": …, "queue": …, "infer": …, "total": …}, "batch_size": 3}

    GET /v1/rungs
    200 {"task": "imagenet", "best": "committee",
         "rungs": [{"name": "committee", "members": [{"name": "resnet50", "sha256": "…"}, …],
                    "fingerprint": "…"}, …]}

Errors are `{"error", "code"}` with the statuses of `hawkvision.errors`. A deadline is sent as time *left*, not as a
time of day, because the clocks of edge and datacenter need not agree; the uplink's own time is the edge's to subtract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from hawkvision.errors import BadField

INFER_PATH: Final = "/v1/infer"
RUNGS_PATH: Final = "/v1/rungs"
TASK_HEADER: Final = "X-HawkVision-Task"
VARIANT_HEADER: Final = "X-HawkVision-Variant"
DEADLINE_HEADER: Final = "X-HawkVision-Deadline-Ms"
TOP_K_HEADER: Final = "X-HawkVision-Top-K"
TRACE_HEADER: Final = "traceparent"
MAX_TOP_K: Final = 1000
MAX_DEADLINE_MS: Final = 3_600_000.0


class HopRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the edge asks of one picture. None leaves the choice to the datacenter tier."""

    task: str | None = None
    variant: str | None = None
    deadline_ms: float | None = None
    """Time left when the request was sent; zero or less has already expired."""
    top_k: int = 5

    def headers(self) -> dict[str, str]:
        """The request as headers; `parse_hop_headers` reads them back."""
        headers = {TOP_K_HEADER: str(self.top_k)}
        if self.task is not None:
            headers[TASK_HEADER] = self.task
        if self.variant is not None:
            headers[VARIANT_HEADER] = self.variant
        if self.deadline_ms is not None:
            headers[DEADLINE_HEADER] = repr(float(self.deadline_ms))
        return headers


class HopClass(msgspec.Struct, frozen=True):
    """One class with its calibrated probability under the rung that answered."""

    index: int
    confidence: float


class HopTiming(msgspec.Struct, frozen=True):
    """Milliseconds inside the datacenter tier. A committee reports its slowest member's stages."""

    decode: float
    queue: float
    infer: float
    total: float


class HopReply(msgspec.Struct, frozen=True):
    """The answer; `top_k[0]` is the most probable class, `batch_size` the pictures inferred together."""

    top_k: tuple[HopClass, ...]
    model: str
    timing_ms: HopTiming
    batch_size: int


class RungMember(msgspec.Struct, frozen=True):
    """A variant and the hash of the very file that is loaded; None for a backend without a file (`noop`)."""

    name: str
    sha256: str | None


class Rung(msgspec.Struct, frozen=True):
    """One rung that can be asked for: a variant, or a committee of several."""

    name: str
    members: tuple[RungMember, ...]
    fingerprint: str | None = None
    """`Manifest.fingerprint`: files, input handling, temperatures and averaging in one hash; None without files."""


class Rungs(msgspec.Struct, frozen=True):
    """What the tier serves, cheapest first. An edge refuses certificates that were made for other files."""

    task: str
    best: str
    rungs: tuple[Rung, ...]


def parse_hop_headers(headers: Mapping[str, str]) -> HopRequest:
    """The request that the headers state; names are matched as `headers` does (Starlette's ignore case).

    Raises:
        BadField: naming the header, what was expected and what was found.
    """
    return HopRequest(
        task=headers.get(TASK_HEADER) or None,
        variant=headers.get(VARIANT_HEADER) or None,
        deadline_ms=_deadline(headers.get(DEADLINE_HEADER)),
        top_k=_top_k(headers.get(TOP_K_HEADER)),
    )


def _deadline(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value > MAX_DEADLINE_MS:
        raise BadField(f"{DEADLINE_HEADER}: expected milliseconds left, at most {MAX_DEADLINE_MS:g}, got {text[:40]!r}")
    return value


def _top_k(text: str | None) -> int:
    if text is None:
        return HopRequest().top_k
    # isascii, because str.isdigit also accepts digits that a header cannot carry, such as '²'.
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_TOP_K):
        raise BadField(f"{TOP_K_HEADER}: expected a whole number from 1 to {MAX_TOP_K}, got {text[:40]!r}")
    return int(text)
