"""The interface of task kinds: what a prediction is, how sure it is, how wrong, and how it looks on the wire.

    backend ── decoder ── tensors ──► outputs ── Output ──► unmirror, place ──► combine ─┐
                                                                                         │
        accept or escalate ◄── score ◄──────────────── Output ───────────────────────────┤
        answer, reply ◄─────────────────┬───────── Prediction ──── predict ◄─────────────┘
        certificates, monitoring ◄──── loss, disagreement

Everything outside `hawkvision.tasks`, decoders and manifests uses kinds only through this interface. A kind is
registered as an entry point of the group `hawkvision.tasks`. `hawkvision.testing.TaskKindConformance` states the
contract as tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
import numpy as np

from hawkvision.core.errors import BadField
from hawkvision.core.types import Output as Output
from hawkvision.core.types import Prediction as Prediction
from hawkvision.core.types import Tensors as Tensors
from hawkvision.core.types import ToImage as ToImage
from hawkvision.models.input_spec import Weights as Weights
from hawkvision.tasks.measured_kind import MeasuredKind
from hawkvision.tasks.measured_kind import PredictionT as PredictionT
from hawkvision.tasks.measured_kind import Truth as Truth


class TensorSpec(NamedTuple):
    """A tensor as it is announced."""

    datatype: Literal["BYTES", "INT64", "FP32"]
    shape: tuple[int, ...]
    """The shape for n predictions; -1 for n and for other lengths that vary."""
    ranked: bool = False
    """Whether it can list the best k classes in its place (Triton's classification extension)."""


class WireTensor(NamedTuple):
    """A tensor of predictions: its shape, and its elements in C order."""

    shape: tuple[int, ...]
    values: Sequence[str] | Sequence[int] | Sequence[float]


PACKED_BYTES: Final = 480
"""Of an output on the wire: a reply with it, in base64, fits one datagram."""
STEPS: Final = 65535
"""Fractions on the wire are counted in this many steps."""
_ENTRY: Final = np.dtype([("index", "<u2"), ("value", "<u2")])
NO_TENSORS: Final[Mapping[str, TensorSpec]] = MappingProxyType({})


class TaskKind(MeasuredKind[PredictionT]):
    """One kind of task, with the labels and options of one task's manifest.

    Instances are immutable and may be used from several threads.
    """

    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = NO_TENSORS
    """The tensors that `tensors` makes, by name; none where predictions are sent as JSON only."""

    def confidence(self, prediction: PredictionT) -> float:  # noqa: ARG002 - for kinds that state one
        """How sure the prediction is, 0..1, for `min_confidence`; the kind says whether it is a calibrated probability.

        Raises:
            BadField: if the kind states none of a whole prediction.
        """
        raise BadField(f"min_confidence: answers of kind {self.name!r} have no confidence; choose another target")

    # ---------------------------------------------------------------------------------------- one image at the edge

    def output(self, tensors: Tensors, row: int, temperature: float, to_image: ToImage | None = None) -> Output:
        """The output for one of n images, placed by `to_image`.

        Raises:
            BackendError: as `outputs`.
        """
        (output,) = self.outputs({name: tensor[row : row + 1] for name, tensor in tensors.items()}, temperature)
        return output if to_image is None else self.place(output, to_image)

    def judge(self, output: Output, limit: int, score: str, temperature: float = 1.0) -> tuple[PredictionT, float]:
        """The prediction of an output and its score, after calibration by a further temperature."""
        if temperature != 1.0:
            output = self.combine([output], (1.0,), temperature)
        return self.predict(output, limit), self.score(output, score)

    def judge_tensors(
        self,
        tensors: Tensors,
        row: int,
        limit: int,
        score: str,
        temperature: float,
        before: float = 1.0,
        to_image: ToImage | None = None,
    ) -> tuple[PredictionT, float]:
        """As `judge`, of `output` for one of n images; the hot path of a stage of one model.

        Args:
            tensors: as `outputs`.
            row: of the image.
            limit: as `predict`.
            score: one of `scores`.
            temperature: calibrates the prediction.
            before: a temperature to apply before; the product of both counts.
            to_image: as `place`; None leaves places as they are.

        Raises:
            BackendError: as `outputs`.
        """
        return self.judge(self.output(tensors, row, before * temperature, to_image), limit, score)

    # ---------------------------------------------------------------------------------------- what people say of it

    def stated(self, prediction: PredictionT) -> Any:
        """What a person would say of an image if the prediction is right, as JSON; `read_label` reads it."""
        return prediction.to_json()

    def read_label(self, label: Any) -> Truth:  # noqa: ARG002 - for kinds whose labels are a few words
        """The label of an image in the form that `loss` takes, from what a person said, as JSON.

        Raises:
            BadField: saying what was expected, or that the kind takes no such labels.
        """
        raise BadField(f"label: images of kind {self.name!r} cannot be labelled in a few words")

    # ---------------------------------------------------------------------------------------------------- the wire

    def encode_reply(self, prediction: PredictionT) -> dict[str, Any]:
        """The fields that the datacenter's reply to an escalation gets; `decode_reply` reads them.

        None has the name of a field of `hawkvision.tasks.serving`.
        """
        fields: dict[str, Any] = msgspec.to_builtins(prediction)
        return fields

    def decode_reply(self, reply: bytes) -> PredictionT:
        """The prediction in the JSON object of a reply; other fields are ignored.

        Raises:
            msgspec.ValidationError, ValueError: naming the field that is missing or malformed.
        """
        return msgspec.json.decode(reply, type=self.prediction)

    def pack(self, output: Output) -> bytes:
        """The output as the tiers send it to be combined with others, in at most `PACKED_BYTES`.

        By default one number 0..1 per label, of which the largest are sent, as index and value in 16 bits each. Kinds
        with other outputs override it.
        """
        best = np.argsort(-output, kind="stable")[: PACKED_BYTES // _ENTRY.itemsize]
        entries = np.zeros(len(best), _ENTRY)
        entries["index"], entries["value"] = best, np.rint(output[best] * STEPS)
        return entries.tobytes()

    def unpack(self, packed: bytes) -> Output:
        """The inverse of `pack`; what was not sent is 0.

        Raises:
            ValueError: saying what was expected.
        """
        entries = np.frombuffer(packed, _ENTRY)
        if not len(entries) or (entries["index"] >= len(self.labels)).any():
            raise ValueError(f"output: expected indices from 0 to {len(self.labels) - 1}")
        output = np.zeros(len(self.labels), np.float32)
        output[entries["index"]] = entries["value"] / np.float32(STEPS)
        return output

    def encode_compared(self, prediction: PredictionT) -> dict[str, Any]:
        """The fields of a prediction that is only compared with another one; `decode_compared` reads them."""
        return self.encode_reply(prediction)

    def decode_compared(self, reply: bytes) -> PredictionT:
        """A prediction of which only `disagreement` is asked, in a JSON object; other fields are ignored.

        Raises:
            msgspec.ValidationError, ValueError: as `decode_reply`.
        """
        return self.decode_reply(reply)

    def tensors(self, predictions: Sequence[PredictionT], ranked: int | None = None) -> Mapping[str, WireTensor]:  # noqa: ARG002
        """The tensors of predictions for the Open Inference Protocol, named as in `wire_tensors`.

        Args:
            predictions: of one request, at least one.
            ranked: of each prediction, list so many classes as `confidence:index:label` in the tensor that is `ranked`.
        """
        return {}
