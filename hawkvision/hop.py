"""The hop from an edge node to the datacenter tier: what travels on the wire, and nothing else.

    POST /v1/infer
        X-HawkVision-Task: imagenet            default: the tier's own task
        X-HawkVision-Variant: committee        a rung of the ladder; default: the best served
        X-HawkVision-Deadline-Ms: 180.0        time left when sent; absent: none
        X-HawkVision-Top-K: 5
        X-HawkVision-Accept-Score: 0.913       these three together: the variant looks first, and
        X-HawkVision-Score: margin             unless its score of this kind is at least that, the
        X-HawkVision-Otherwise: committee      otherwise-rung answers
        traceparent: 00-…                      W3C trace context
        Authorization: Bearer KEY              when the tier has a key
        <the caller's own encoded picture, never re-encoded>

    200 {"top_k": [{"index": 281, "confidence": 0.83}, …], "model": "committee",
         "timing_ms": {"decode": …, "queue": …, "infer": …, "total": …}, "batch_size": 3,
         "score": null, "passed_over": null}

    GET /v1/rungs
    200 {"task": "imagenet", "best": "committee",
         "rungs": [{"name": "committee", "members": [{"name": "resnet50", "sha256": "…"}, …],
                    "fingerprint": "…"}, …]}

Errors are `{"error", "code"}` with the statuses of `hawkvision.errors`. A deadline is sent as time *left*, not as a
time of day, because the clocks of edge and datacenter need not agree; the uplink's own time is the edge's to subtract.

The certificate of an edge rung may cover three levels: edge, a middle rung, the best. The second decision is then
taken in the tier, for the price of one round trip:

    score of the variant ≥ Accept-Score ──►  200, "model": the variant,        "score": its own, ≥ Accept-Score
    else, within the same deadline      ──►  200, "model": the otherwise-rung, "score": its own, whatever it is,
                                             "passed_over": {"index": 282, "score": 0.41}   what the variant said

The score is `cascade.scores.score` of the rung's calibrated probabilities as served (the manifest's temperatures), in
float32; the comparison widens it to float64, which is exact, and the header writes the threshold with as many digits
as give the same float64 back. So the tier accepts exactly the pictures that a computation offline accepts. Scores
reach 1.0, so a middle rung that is not to be believed at all, only to be watched, gets the Accept-Score `inf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from hawkvision.errors import BadField
from hawkvision.types import Score

INFER_PATH: Final = "/v1/infer"
RUNGS_PATH: Final = "/v1/rungs"
TASK_HEADER: Final = "X-HawkVision-Task"
VARIANT_HEADER: Final = "X-HawkVision-Variant"
DEADLINE_HEADER: Final = "X-HawkVision-Deadline-Ms"
TOP_K_HEADER: Final = "X-HawkVision-Top-K"
ACCEPT_SCORE_HEADER: Final = "X-HawkVision-Accept-Score"
SCORE_HEADER: Final = "X-HawkVision-Score"
OTHERWISE_HEADER: Final = "X-HawkVision-Otherwise"
TRACE_HEADER: Final = "traceparent"
MAX_TOP_K: Final = 1000
MAX_DEADLINE_MS: Final = 3_600_000.0


class Middle(msgspec.Struct, frozen=True):
    """The variant asked for is a middle rung: its answer counts if it is sure enough, else another rung's does."""

    score: Score
    accept_score: float
    """0..1, or +∞; the middle rung's answer is accepted if its score is at least this."""
    otherwise: str
    """The rung that answers if not."""


class HopRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the edge asks of one picture. None leaves the choice to the datacenter tier."""

    task: str | None = None
    variant: str | None = None
    deadline_ms: float | None = None
    """Time left when the request was sent; zero or less has already expired."""
    top_k: int = 5
    middle: Middle | None = None
    """With it, `variant` must name the middle rung, and another one than `middle.otherwise`."""

    def headers(self) -> dict[str, str]:
        """The request as headers; `parse_hop_headers` reads them back."""
        headers = {TOP_K_HEADER: str(self.top_k)}
        if self.task is not None:
            headers[TASK_HEADER] = self.task
        if self.variant is not None:
            headers[VARIANT_HEADER] = self.variant
        if self.deadline_ms is not None:
            headers[DEADLINE_HEADER] = repr(float(self.deadline_ms))
        if self.middle is not None:
            headers[ACCEPT_SCORE_HEADER] = repr(float(self.middle.accept_score))
            headers[SCORE_HEADER] = self.middle.score.value
            headers[OTHERWISE_HEADER] = self.middle.otherwise
        return headers


class HopClass(msgspec.Struct, frozen=True):
    """One class with its calibrated probability under the rung that answered."""

    index: int
    confidence: float


class HopTiming(msgspec.Struct, frozen=True):
    """Milliseconds inside the datacenter tier. A committee reports its slowest member's stages; two looks add up."""

    decode: float
    queue: float
    infer: float
    total: float


class PassedOver(msgspec.Struct, frozen=True):
    """What a middle rung saw that was not sure enough: its most probable class, and its score.

    With the answer that counts it tells, for nothing, whether the two rungs agree; online control learns from that.
    """

    index: int
    score: float


class HopReply(msgspec.Struct, frozen=True):
    """The answer; `top_k[0]` is the most probable class, `batch_size` the most pictures inferred together."""

    top_k: tuple[HopClass, ...]
    model: str
    """The rung that answered: the one asked for, or with a middle rung possibly `Middle.otherwise`."""
    timing_ms: HopTiming
    batch_size: int
    score: float | None = None
    """The answering rung's own score, of the kind that `Middle.score` asked for; None if no middle rung was named."""
    passed_over: PassedOver | None = None
    """The middle rung's answer where the otherwise-rung gave the one that counts."""


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
    variant = headers.get(VARIANT_HEADER) or None
    return HopRequest(
        task=headers.get(TASK_HEADER) or None,
        variant=variant,
        deadline_ms=_deadline(headers.get(DEADLINE_HEADER)),
        top_k=_top_k(headers.get(TOP_K_HEADER)),
        middle=_middle(headers, variant),
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


def _middle(headers: Mapping[str, str], variant: str | None) -> Middle | None:
    names = (ACCEPT_SCORE_HEADER, SCORE_HEADER, OTHERWISE_HEADER)
    given = [headers.get(name) for name in names]
    accept_score, kind, otherwise = given
    if accept_score is None and kind is None and otherwise is None:
        return None
    if accept_score is None or kind is None or otherwise is None:
        absent = names[given.index(None)]
        raise BadField(f"{absent}: missing; {', '.join(names)} belong together, all or none")
    if variant is None:
        raise BadField(f"{VARIANT_HEADER}: missing; {ACCEPT_SCORE_HEADER} needs it to name the rung that looks first")
    if otherwise in ("", variant):
        raise BadField(
            f"{OTHERWISE_HEADER}: expected another rung than the {VARIANT_HEADER} {variant[:64]!r}, "
            f"got {otherwise[:64]!r}"
        )
    return Middle(_score(kind), _accept_score(accept_score), otherwise)


def _score(text: str) -> Score:
    try:
        return Score(text)
    except ValueError:
        kinds = " or ".join(Score)
        raise BadField(f"{SCORE_HEADER}: expected {kinds}, got {text[:40]!r}") from None


def _accept_score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0.0 <= value <= 1.0 or value == math.inf):  # false of nan, too
        raise BadField(f"{ACCEPT_SCORE_HEADER}: expected a number from 0 to 1, or inf, got {text[:40]!r}")
    return value
