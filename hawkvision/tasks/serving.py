"""How outputs and predictions of any kind are served: from a model's tensors to the wire between the tiers.

The JSON of a reply to an escalation has the fields of the task's kind, then those that all kinds have:

    {"top_k": [{"index": 281, …}, …], "model": "ensemble", …, "passed_over": {"index": 282, "score": 0.41, …}}
      the kind's                      of all kinds                            the kind's    of all kinds

Here the kind is classification. A reply of some members has no fields of the kind: `part` has their output instead,
which the edge can combine with its own (`hawkvision.tasks.last_answer`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from hawkvision.core.errors import BackendError
from hawkvision.core.escalation_api import (
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateResult,
    PartialEnsemble,
)
from hawkvision.models.manifest import Variant
from hawkvision.tasks.decoders.registry import open_decoder
from hawkvision.tasks.kind import Output, TaskKind, Tensors


class OutputDecoder:
    """The decoder of a manifest's variant with its temperature, and the kind of its task.

    Raises:
        ManifestError: if the decoder is not installed, or refuses its options.
    """

    def __init__(self, variant: Variant, kind: TaskKind[Any]) -> None:
        self.variant = variant.name
        self.decode = open_decoder(variant, len(kind.labels))
        self.kind = kind
        self.temperature = variant.temperature

    def __call__(self, tensors: Tensors) -> list[Output]:
        """The outputs for n images, with places as in the model's input.

        Raises:
            BackendError: if the tensors are not those that the decoder and the kind expect, naming the variant.
        """
        try:
            return self.kind.outputs(self.decode(tensors), self.temperature)
        except BackendError as error:
            raise BackendError(f"{self.variant}: {error.message}") from None


_NULL: Final = msgspec.Raw(b"null")


class _PassedOver(msgspec.Struct, frozen=True):
    score: float
    fingerprint: str | None = None


class _Part(msgspec.Struct, frozen=True):
    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    output: bytes
    decided: bool = False


class _Reply(msgspec.Struct, frozen=True):
    """See `EscalationReply`."""

    model: str
    timing_ms: EscalationTiming
    batch_size: int
    score: float | None = None
    passed_over: msgspec.Raw = _NULL
    received_fraction: float = 1.0
    quality: int | None = None
    part: _Part | None = None
    fingerprint: str | None = None


FIELDS: Final = frozenset(_Reply.__struct_fields__)
"""Names that no field of a kind has."""

_decode = msgspec.json.Decoder(_Reply).decode
_decode_passed_over = msgspec.json.Decoder(_PassedOver).decode


def encode_reply(kind: TaskKind[Any], reply: EscalationReply) -> bytes:
    """The JSON object of a reply."""
    over, part = reply.passed_over, reply.part
    return msgspec.json.encode(
        {
            **(kind.encode_reply(reply.prediction) if part is None else {}),
            "model": reply.model,
            "timing_ms": reply.timing_ms,
            "batch_size": reply.batch_size,
            "score": reply.score,
            "passed_over": None if over is None else _passed_over(kind, over),
            "received_fraction": reply.received_fraction,
            "quality": reply.quality,
            "part": None if part is None else _Part(part.members, kind.pack(part.output), part.decided),
            "fingerprint": reply.fingerprint,
        }
    )


def decode_reply(kind: TaskKind[Any], data: bytes, limit: int = EscalationRequest().top_k) -> EscalationReply:
    """The reply in a JSON object; unknown fields, from later tiers, are ignored.

    `limit` is that of `TaskKind.predict` for a reply with the output of members.

    Raises:
        msgspec.DecodeError, ValueError: naming the field that is missing, malformed or not the kind's.
    """
    found, over = _decode(data), None
    if (raw := bytes(found.passed_over)) != b"null":
        common = _decode_passed_over(raw)
        over = IntermediateResult(kind.decode_compared(raw), common.score, common.fingerprint)
    part, sent = None, found.part
    if sent is not None:
        part = PartialEnsemble(sent.members, kind.unpack(sent.output), sent.decided)
    return EscalationReply(
        kind.decode_reply(data) if part is None else kind.predict(part.output, limit),
        found.model,
        found.timing_ms,
        found.batch_size,
        found.score,
        over,
        found.received_fraction,
        found.quality,
        part,
        found.fingerprint,
    )


def _passed_over(kind: TaskKind[Any], result: IntermediateResult) -> dict[str, Any]:
    fields = kind.encode_compared(result.prediction)
    return {**fields, "score": result.score, "fingerprint": result.fingerprint}
