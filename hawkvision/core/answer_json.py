"""The JSON of an answer: what `Answer.to_json` writes, clients read, and `/openapi.json` describes.

An answer has these fields and those of its prediction, side by side.
"""

from __future__ import annotations

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
    basis: Annotated[Basis, Meta(description="What the status rests on.")]
    delta: Annotated[Fraction | None, Meta(description="Probability that the certificate is wrong, at most.")]
    n: Annotated[int | None, Meta(description="Images that the certificate was tested on.")]
    status_reason: Annotated[
        StatusReason | None, Meta(description="Why the status is not `certified`; null if it is.")
    ] = None


class AnswerFields(msgspec.Struct, frozen=True):
    """The fields of every answer, whatever its kind of task. Readers ignore further fields."""

    id: Annotated[str, Meta(description="Names this answer, in logs too.")]
    task: Annotated[str, Meta(description="The task that answered.")]
    model: Annotated[str, Meta(description="The stage that computed the prediction.")]
    tier: Annotated[Tier, Meta(description="Where it ran.")]
    escalated: Annotated[bool, Meta(description="Whether the image was sent to the datacenter.")]
    reason: Annotated[Reason | None, Meta(description="Why it was sent; null if it was not.")]
    degraded: Annotated[bool, Meta(description="Whether the answer is below what its target asks for.")]
    received_fraction: Annotated[Fraction, Meta(description="Share of the image that arrived, over datagrams.")]
    accuracy: Annotated[AccuracyFields, Meta(description="The guarantee.")]
    deadline_met: Annotated[bool | None, Meta(description="Whether the deadline was met; null without one.")]
    timing_ms: Annotated[Timing, Meta(description="Where the time went.")]
    degraded_reason: Annotated[DegradedReason | None, Meta(description="Why it is degraded; null if it is not.")] = None
