"""The reply of the datacenter tier to one image. `hawkvision.tasks.serving` writes and reads its JSON."""

from __future__ import annotations

import msgspec

from hawkvision.core.types import Prediction


class EscalationTiming(msgspec.Struct, frozen=True):
    """Milliseconds in the datacenter tier. An ensemble reports its slowest member; two inferences add up."""

    decode: float
    queue: float
    infer: float
    total: float
    first: float | None = None
    """When the first reply was ready, complete or not."""


class IntermediateResult(msgspec.Struct, frozen=True):
    """The result of an intermediate stage whose score did not suffice.

    Together with the answer it shows whether the two stages agree, which online control uses.
    """

    prediction: Prediction
    """As much of it as a comparison needs (`TaskKind.decode_compared`)."""
    score: float
    fingerprint: str | None = None
    """See `EscalationReply.fingerprint`."""


class EscalationReply(msgspec.Struct, frozen=True):
    """The reply. `hawkvision.tasks.serving` writes and reads its JSON."""

    prediction: Prediction
    model: str
    """The stage that answered: the one asked for, or with an intermediate stage possibly
    `IntermediateOffer.otherwise`."""
    timing_ms: EscalationTiming
    batch_size: int
    """The most images that were inferred together."""
    score: float | None = None
    """The answering stage's own score, the one that `IntermediateOffer.score` asked for; None if no intermediate
    stage was named."""
    passed_over: IntermediateResult | None = None
    """The intermediate stage's result, if the otherwise-stage answered."""
    received_fraction: float = 1.0
    """Share of the image that reached the tier; the rest was concealed."""
    quality: int | None = None
    """JPEG quality at which the transport encoded the image; None if it was sent unchanged."""
    complete: bool = True
    """Whether all members of the stage ran, or so many that the prediction is decided
    (`datacenter.stages.cascade_executor`). Only a progressive request has other replies."""
    fingerprint: str | None = None
    """What computed the answer, as stated by the replicas that ran the models
    (`hawkvision.models.fingerprints.stage_fingerprint`). None for incomplete replies and for tiers that state
    nothing."""

    @property
    def whole(self) -> bool:
        """Whether the tier answered exactly the image that the edge sent."""
        return self.received_fraction == 1.0 and self.quality is None

    @property
    def comparable(self) -> bool:
        """Whether this is the stage's complete answer to exactly the image that the edge sent."""
        return self.whole and self.complete
