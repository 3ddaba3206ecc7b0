"""The JSON of an answer: what `Answer.to_json` writes, clients read, and `/openapi.json` describes.

An answer has these fields and those of its prediction, side by side.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hawkvision.core.types import AccuracyStatus, Basis, DegradedReason, Quality, Reason, StatusReason, Tier, Timing

Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]


class TargetFields(msgspec.Struct, frozen=True):
    """A target, as the request field that states it; an answer has exactly one."""

    min_accuracy: Annotated[Fraction | UnsetType, Meta(description="At least this share of answers is right.")] = UNSET
    max_accuracy_drop: Annotated[
        Fraction | UnsetType, Meta(description="At most this much less accurate than the reference stage.")
    ] = UNSET
    quality: Annotated[Quality | UnsetType, Meta(description="A class of targets.")] = UNSET
    min_confidence: Annotated[
        Fraction | UnsetType, Meta(description="The `confidence` that the answer has at least, or it is escalated.")
    ] = UNSET


class AccuracyFields(msgspec.Struct, frozen=True, kw_only=True):
    """What is guaranteed to the stream of answers to this target."""

    target: Annotated[TargetFields, Meta(description="The target, as the field that stated it.")]
    max_drop: Annotated[
        Fraction | None,
        Meta(description="Accuracy below the reference stage's, at most; null without a certificate."),
    ]
    watched_max_drop: Annotated[
        Fraction | None,
        Meta(
            description="What audits without labels hold the drop to: the certified disagreement. Null without a "
            "certificate, and where agreement bounds no accuracy drop."
        ),
    ]
    max_disagreement: Annotated[
        Fraction | UnsetType,
        Meta(
            description="Mean disagreement with the reference stage, at most. In place of `max_drop` where "
            "certificates were made without labels and agreement bounds no accuracy drop; else absent."
        ),
    ] = UNSET
    status: Annotated[
        AccuracyStatus, Meta(description="Whether `max_drop` is certified, or for a `quality` `max_disagreement`.")
    ]
    basis: Annotated[
        Basis | None,
        Meta(
            description="Images that it rests on: the profile's (`shipped`), a folder of the site's (`site`), labelled "
            "audits (`review`), or only agreement on images without labels (`agreement`); null without a certificate."
        ),
    ]
    delta: Annotated[Fraction | None, Meta(description="Probability that the certificate is wrong, at most.")]
    n: Annotated[int | None, Meta(description="Images that the certificate was tested on.")]
    labels: Annotated[int | None, Meta(description="How many of them have labels.")]
    since: Annotated[datetime | None, Meta(description="Time of the oldest of them; null where it is not known.")] = (
        msgspec.field(name="from")
    )
    until: Annotated[datetime | None, Meta(description="Time of the newest of them.")] = msgspec.field(name="to")
    status_reason: Annotated[
        StatusReason | None, Meta(description="Why the status is not `certified`; null if it is.")
    ] = None


class AnswerFields(msgspec.Struct, frozen=True):
    """The fields of every answer, whatever its kind of task. Readers ignore further fields."""

    id: Annotated[str, Meta(description="Names this answer, in logs too.")]
    task: Annotated[str, Meta(description="The task that answered.")]
    model: Annotated[
        str,
        Meta(
            description="The stage that computed the prediction; EDGE+DATACENTER for an ensemble of the edge's models "
            "and those of the datacenter's that replied in time."
        ),
    ]
    tier: Annotated[Tier, Meta(description="Where it ran.")]
    escalated: Annotated[bool, Meta(description="Whether the image was sent to the datacenter.")]
    reason: Annotated[Reason | None, Meta(description="Why it was sent; null if it was not.")]
    degraded: Annotated[bool, Meta(description="Whether the answer is below what its target asks for.")]
    received_fraction: Annotated[Fraction, Meta(description="Share of the image that arrived, over datagrams.")]
    accuracy: Annotated[AccuracyFields, Meta(description="The guarantee.")]
    deadline_met: Annotated[bool | None, Meta(description="Whether the deadline was met; null without one.")]
    timing_ms: Annotated[Timing, Meta(description="Where the time went.")]
    degraded_reason: Annotated[DegradedReason | None, Meta(description="Why it is degraded; null if it is not.")] = None
    edge_score: Annotated[
        float | None,
        Meta(description="The edge's score of the image, as the target compares it; null if it did not run."),
    ] = None
    edge_threshold: Annotated[
        float | None,
        Meta(description="The score from which on the edge stage answers; null if it always or never does."),
    ] = None
