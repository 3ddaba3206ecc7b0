"""Requests and answers as immutable values.

Names that end in `_ms` are milliseconds, in `_s` seconds. Accuracies and confidences are fractions in 0..1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]
"""Images as (height, width, 3) or batches as (n, height, width, 3), RGB, 0..255."""

Logits: TypeAlias = NDArray[np.float32]
"""(n, classes), before softmax and temperature."""

Tensors: TypeAlias = Mapping[str, NDArray[np.float32]]
"""What a backend returns for n images, by name; the first axis of each has length n."""

Output: TypeAlias = NDArray[np.float32]
"""What a stage computed of one image, in the shape that its task kind defines. It travels between processes."""

ToImage: TypeAlias = Callable[[NDArray[Any]], NDArray[np.float64]]
"""Maps boxes (k, 4) of x1, y1, x2, y2 from fractions of a model's input to fractions of the upright image.

It is `hawkvision.imaging.placement.Placement.to_image`. Boxes may reach beyond the image; nothing is clipped.
"""

LOGITS: Final = "logits"
"""The name of the tensor of a model that has only one, whatever its file calls it."""


class Quality(StrEnum):
    """Targets for callers who choose no number."""

    FAST = "fast"
    BALANCED = "balanced"
    BEST = "best"


class OnMiss(StrEnum):
    """What to do when the deadline would pass before the target is met."""

    DEGRADE = "degrade"
    WAIT = "wait"
    FAIL = "fail"


class Tier(StrEnum):
    """The tier that computed an answer."""

    EDGE = "edge"
    DATACENTER = "datacenter"


class Reason(StrEnum):
    """Why an image was escalated. Answers never say `audit` or `trial`, because those run in the background."""

    LOW_CONFIDENCE = "low_confidence"
    AUDIT = "audit"
    TARGET = "target"
    SUSPENDED = "suspended"
    EDGE_BUSY = "edge_busy"
    EDGE_SLOW = "edge_slow"
    EDGE_NOT_READY = "edge_not_ready"
    TRIAL = "trial"


class DegradedReason(StrEnum):
    """Why an answer is below what its target asks for."""

    NO_DATACENTER = "no_datacenter"
    """The node has none, and the edge was not sure enough."""
    UNREACHABLE = "unreachable"
    """The datacenter did not answer lately, and was not asked."""
    NO_TIME = "no_time"
    """The datacenter was not asked or waited for: its reply was not likely to be in time."""
    NO_REPLY = "no_reply"
    """The datacenter was asked and gave no usable reply in time."""
    INCOMPLETE = "incomplete"
    """Only a part of the datacenter's models replied in time, or another stage than the best."""
    PARTIAL_IMAGE = "partial_image"
    """Too little of the image arrived."""


class AccuracyStatus(StrEnum):
    """Whether the accuracy target is certified, only aimed at, or suspended by an alarm."""

    CERTIFIED = "certified"
    BEST_EFFORT = "best_effort"
    SUSPENDED = "suspended"


class Basis(StrEnum):
    """The images that a guarantee rests on."""

    SHIPPED = "shipped"
    """Those of the profile, as the model card names them."""
    SITE = "site"
    """A folder of the site's own images."""
    REVIEW = "review"
    """Audits of the site's traffic, labelled by people."""
    AGREEMENT = "agreement"
    """Images without labels, of a kind where agreement bounds no accuracy drop: `max_disagreement` alone is certified.
    """


class StatusReason(StrEnum):
    """Why a status is not `certified`; if several apply, the first of them."""

    ALARM = "alarm"
    """Audits show that the traffic is not as certified; the status is `suspended`."""
    DEGRADED = "degraded"
    """The answer is below its target; `degraded_reason` says why."""
    PARTIAL_IMAGE = "partial_image"
    """A stage saw less of the image than the caller has sent, or than the stage that it is compared with."""
    UNCERTIFIED_VERSION = "uncertified_version"
    """What computed the answer, or runs as the reference, is not known to be what was certified."""
    NO_CERTIFICATE = "no_certificate"
    """No certificate covers the target."""
    MIN_ACCURACY = "min_accuracy"
    """An accuracy was asked for, which nobody can watch without labels."""
    AGREEMENT_ONLY = "agreement_only"
    """Only `max_disagreement` is certified, and a drop or an accuracy was asked for."""
    UNMONITORED = "unmonitored"
    """Too few audits take place to tell whether the certificate holds for the traffic."""
    EXPIRED = "expired"
    """The newest image behind a site's certificate is older than `certificate_max_age_days`, or later than the node's
    clock."""
    LATE = "late"
    """Too many requests of the caller and target were not answered as routed: late, below their target, or not."""


@dataclass(frozen=True, slots=True)
class MinAccuracy:
    """At least this share of answers is right: aimed at, never certified, as nobody can watch it without labels."""

    value: float


@dataclass(frozen=True, slots=True)
class MaxAccuracyDrop:
    """The share of right answers is at most this much below that of the reference stage."""

    value: float


@dataclass(frozen=True, slots=True)
class MinConfidence:
    """Escalate unless the answer's `confidence` is at least this; see the kind of the task for what that says."""

    value: float


Target: TypeAlias = MinAccuracy | MaxAccuracyDrop | MinConfidence | Quality


def target_fields(target: Target) -> dict[str, float | str]:
    """The target as a request field, such as `{"max_accuracy_drop": 0.02}`."""
    match target:
        case MinAccuracy(value):
            return {"min_accuracy": value}
        case MaxAccuracyDrop(value):
            return {"max_accuracy_drop": value}
        case MinConfidence(value):
            return {"min_confidence": value}
        case Quality():
            return {"quality": target.value}


@dataclass(frozen=True, slots=True)
class RequestFields:
    """A request about one image, without the image."""

    task: str | None = None
    target: Target = Quality.BALANCED
    deadline_ms: float | None = None
    on_miss: OnMiss = OnMiss.DEGRADE
    stream: str | None = None
    top_k: int = 5
    kind: str | None = None
    """The kind that the task must have; without a task, the first of this kind answers."""

    def promised(self, started: float) -> float | None:
        """When the answer must leave; None without a deadline, and if a late answer is wanted.

        Args:
            started: when the request came, in seconds on the same clock.
        """
        if self.deadline_ms is None or self.on_miss is OnMiss.WAIT:
            return None
        return started + self.deadline_ms * 1e-3


@dataclass(frozen=True, slots=True)
class Received:
    """What of the caller's image is there: how much of it, and how coarsely it was quantised on the way."""

    fraction: float = 1.0
    """Share of its area in true pixels, 0..1; the rest is made up."""
    quality: int | None = None
    """JPEG quality at which the transport encoded it anew, 1..100; None: the caller's own bytes."""


WHOLE = Received()


class Prediction(msgspec.Struct, frozen=True):
    """What a caller gets for one image. A kind of task declares the fields."""

    def to_json(self) -> dict[str, Any]:
        """The fields that an answer gets, as JSON values in their order; the prediction's type reads them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    def summary(self) -> str:
        """The prediction for people, in a few words."""
        return msgspec.json.encode(self.to_json()).decode()

    @classmethod
    def json_type(cls) -> type[msgspec.Struct]:
        """The type of what `to_json` writes, for the description of the API."""
        return cls

    @classmethod
    def example(cls) -> Self | None:
        """A prediction for the description of the API."""
        return None


class LabelledClass(msgspec.Struct, frozen=True):
    """One class with its calibrated probability."""

    label: Annotated[str, Meta(description="Its name.")]
    index: Annotated[int, Meta(description="Its index in the list of labels.")]
    confidence: Annotated[float, Meta(description="The calibrated probability that it is right.")]


@dataclass(frozen=True, slots=True)
class AccuracyGuarantee:
    """The accuracy guarantee for the stream of answers to one target.

    `max_drop` is the certified bound on the drop below the reference stage, and `delta` the probability that the
    guarantee is wrong. What says nothing of a certificate is None: without one, and where the reference stage answers
    everything. A target of `min_accuracy` is `best_effort`.

    Where agreement with the reference stage bounds no accuracy drop (`TaskKind.agreement_bounds_drop`), certificates
    without labels state `max_disagreement` in place of `max_drop`. They certify no target that names an accuracy, so
    that such a target stays `best_effort`.
    """

    target: Target
    status: AccuracyStatus
    basis: Basis | None = None
    max_drop: float | None = None
    watched_max_drop: float | None = None
    """What audits, which need no labels, hold the drop to: the certified disagreement. None where it bounds none."""
    delta: float | None = None
    n: int | None = None
    """Images behind the certificate."""
    labels: int | None = None
    """How many of them have labels."""
    since: datetime | None = None
    """Time of the oldest of these images (`from` in JSON); None where it is not known, as of shipped ones."""
    until: datetime | None = None
    """Time of the newest of them (`to` in JSON)."""
    max_disagreement: float | None = None
    """The certified bound on the mean disagreement with the reference stage, 0..1."""
    status_reason: StatusReason | None = None
    """Why it is not certified; None if it is."""

    def to_json(self) -> dict[str, Any]:
        """The `accuracy` block of an answer; `max_disagreement` is left out where there is none."""
        fields: dict[str, Any] = {
            "target": target_fields(self.target),
            "max_drop": self.max_drop,
            "watched_max_drop": self.watched_max_drop,
        }
        if self.max_disagreement is not None:
            fields["max_disagreement"] = self.max_disagreement
        return fields | {
            "status": self.status.value,
            "status_reason": None if self.status_reason is None else self.status_reason.value,
            "basis": None if self.basis is None else self.basis.value,
            "delta": self.delta,
            "n": self.n,
            "labels": self.labels,
            "from": time_text(self.since),
            "to": time_text(self.until),
        }


def time_text(time: datetime | None) -> str | None:
    """A time with a time zone as JSON has it (RFC 3339, UTC); None stays None."""
    return None if time is None else time.astimezone(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Timing:
    """Time per phase in milliseconds; zero for a phase that did not take place."""

    decode: Annotated[float, Meta(description="Decoding the image and scaling it to the model's input.")] = 0.0
    queue: Annotated[float, Meta(description="Waiting for a worker.")] = 0.0
    infer: Annotated[float, Meta(description="The edge model.")] = 0.0
    uplink: Annotated[float, Meta(description="The round trip to the datacenter, without `dc`.")] = 0.0
    dc: Annotated[float, Meta(description="The datacenter's work.")] = 0.0
    total: Annotated[float, Meta(description="From the first byte received to the answer.")] = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one image.

    `label`, `index`, `confidence` and `top_k` are those of the prediction, if its kind of task has them.
    """

    id: str
    task: str
    prediction: Prediction
    model: str
    tier: Tier
    accuracy: AccuracyGuarantee
    escalated: bool = False
    reason: Reason | None = None
    degraded: bool = False
    degraded_reason: DegradedReason | None = None
    edge_score: float | None = None
    edge_threshold: float | None = None
    received_fraction: float = 1.0
    deadline_met: bool | None = None
    timing_ms: Timing = field(default_factory=Timing)

    @property
    def top_k(self) -> tuple[LabelledClass, ...]:
        """The most probable classes, in order."""
        found: tuple[LabelledClass, ...] = self._predicted("top_k")
        return found

    @property
    def label(self) -> str:
        """The name of the most probable class."""
        return str(self._predicted("label"))

    @property
    def index(self) -> int:
        """The index of the most probable class."""
        return int(self._predicted("index"))

    @property
    def confidence(self) -> float:
        """The calibrated probability that the prediction is right."""
        return float(self._predicted("confidence"))

    def _predicted(self, name: str) -> Any:
        try:
            return getattr(self.prediction, name)
        except AttributeError:
            kind = type(self.prediction).__name__
            raise AttributeError(f"an answer of task {self.task!r} has no {name}; see `prediction`, a {kind}") from None

    def to_json(self) -> dict[str, Any]:
        """The answer as the JSON object of the API, which `answer_from_json` reads."""
        timing = self.timing_ms
        return {
            "id": self.id,
            "task": self.task,
            **self.prediction.to_json(),
            "model": self.model,
            "tier": self.tier.value,
            "escalated": self.escalated,
            "reason": self.reason.value if self.reason else None,
            "degraded": self.degraded,
            "degraded_reason": self.degraded_reason.value if self.degraded_reason else None,
            "edge_score": self.edge_score,
            "edge_threshold": self.edge_threshold,
            "received_fraction": self.received_fraction,
            "accuracy": self.accuracy.to_json(),
            "deadline_met": self.deadline_met,
            "timing_ms": {
                "decode": round(timing.decode, 3),
                "queue": round(timing.queue, 3),
                "infer": round(timing.infer, 3),
                "uplink": round(timing.uplink, 3),
                "dc": round(timing.dc, 3),
                "total": round(timing.total, 3),
            },
        }
