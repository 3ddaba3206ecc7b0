"""The interface of task kinds: what a prediction is, how sure it is, how wrong, and how it looks on the wire.

    backend ── decoder ── tensors ──► outputs ── Output ──► unmirror, place ──► combine ─┐
                                                                                         │
        accept or escalate ◄── score ◄──────────────── Output ───────────────────────────┤
        answer, reply ◄─────────────────┬───────── Prediction ──── predict ◄─────────────┘
        certificates, drift control ◄── loss, disagreement

Everything outside `hawkvision.tasks`, decoders and manifests uses kinds only through this interface. A kind is
registered as an entry point of the group `hawkvision.tasks`. `hawkvision.testing.TaskKindConformance` states the
contract as tests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BadField, ConfigError, ManifestError
from hawkvision.core.types import Output as Output
from hawkvision.core.types import Prediction as Prediction
from hawkvision.core.types import Tensors as Tensors
from hawkvision.core.types import ToImage as ToImage
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.models.input_spec import Weights as Weights
from hawkvision.tasks.class_scores import Ranking

Truth: TypeAlias = Any
"""The label of one image in the form that the kind's `loss` takes: a class index, boxes, counts, a set of labels."""


class TensorSpec(NamedTuple):
    """A tensor of predictions in the Open Inference Protocol."""

    datatype: Literal["BYTES", "INT64", "FP32"]
    shape: tuple[int, ...]
    """Of n predictions; -1 for n and for other lengths that vary."""
    ranked: bool = False
    """Whether it can list the best k classes in its place (Triton's classification extension)."""


class WireTensor(NamedTuple):
    """A tensor of predictions: its shape, and its elements in C order."""

    shape: tuple[int, ...]
    values: Sequence[str] | Sequence[int] | Sequence[float]


NO_TENSORS: Final[Mapping[str, TensorSpec]] = MappingProxyType({})

PredictionT = TypeVar("PredictionT", bound=Prediction)
OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


class Kernels(Protocol):
    """Native functions that kinds can use, as `hawkvision.inference.int8.ranking` has them."""

    @property
    def most_probable(self) -> Ranking:
        """The most probable classes of one image."""
        ...


class Judged(NamedTuple, Generic[PredictionT]):
    """A prediction, and how sure the stage is of it."""

    prediction: PredictionT
    score: float


class TaskKind(ABC, Generic[PredictionT]):
    """One kind of task, with the labels and options of one task's manifest.

    Instances are immutable and may be used from several threads.
    """

    name: ClassVar[str]
    """The name that manifests use, such as `classification`."""
    prediction: type[PredictionT]
    """The type of predictions."""
    scores: tuple[str, ...]
    """The scores that a stage can be accepted by; the first is preferred when two are equally good."""
    agreement_bounds_drop: ClassVar[bool]
    """Whether loss(a, t) − loss(b, t) ≤ disagreement(a, b) for all predictions a, b and truths t.

    Only then can agreement with the reference stage certify an accuracy drop without labels.
    """
    binary: ClassVar[bool] = False
    """Whether every loss and disagreement is 0 or 1, so that certificates use exact tests."""
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = NO_TENSORS
    """The tensors that `tensors` makes, by name; none where predictions are sent as JSON only."""
    located: ClassVar[bool] = False
    """Whether predictions depend on places in the image. Then outputs are placed, and whole images are escalated."""

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """Take a task's labels, in index order, and the `[options]` of its manifest.

        Raises:
            ManifestError: naming an option that is unknown, missing or out of range.
        """
        self.labels = tuple(labels)
        self.options = dict(options)

    def refuse_unknown_options(self, known: Collection[str]) -> None:
        """Check that the manifest has no other options.

        Raises:
            ManifestError: naming the first that is unknown.
        """
        unknown = sorted(self.options.keys() - set(known))
        if unknown:
            expected = ", ".join(sorted(known)) or "none"
            raise ManifestError(f"options of kind {self.name!r}: unknown option {unknown[0]!r}; expected {expected}")

    def options_as(self, declared: type[OptionsT]) -> OptionsT:
        """The manifest's options as a msgspec Struct, which should have `forbid_unknown_fields=True`.

        Raises:
            ManifestError: naming the option that is unknown, missing or out of range.
        """
        try:
            return msgspec.convert(self.options, declared)
        except msgspec.ValidationError as error:
            raise ManifestError(f"options of kind {self.name!r}: {error}") from None

    # ------------------------------------------------------------------------------------------ outputs of a stage

    @abstractmethod
    def outputs(self, tensors: Tensors, temperature: float) -> list[Output]:
        """The outputs for n images, from a model's decoded tensors (`hawkvision.tasks.decoders`).

        Args:
            tensors: named as the kind's decoders name them.
            temperature: calibrates probabilities; 1 leaves them unchanged.

        Raises:
            BackendError: if a tensor is missing or has another shape.
        """

    @abstractmethod
    def combine(self, members: Sequence[Output], weights: Weights, temperature: float) -> Output:
        """The output of an ensemble, from those of one or more members.

        Args:
            members: their outputs for one image.
            weights: of the members, one number or one per label each; all 1 where the manifest states none.
            temperature: calibrates the result.
        """

    def unmirror(self, output: Output) -> Output:
        """The output for an input, given that for its mirror image (left and right exchanged). Precedes `place`."""
        return output

    def place(self, output: Output, to_image: ToImage) -> Output:  # noqa: ARG002 - most kinds name no places
        """The output with places in the image, given that with places in a model's input. Precedes `combine`."""
        return output

    def decided(self, known: Sequence[Output], missing: int, margin: float = 1.0) -> bool:  # noqa: ARG002 - see below
        """Whether the prediction is final, whatever the missing members or views add. By default only the last decides.

        Args:
            known: the outputs of the members or views so far.
            missing: the number of those still to come.
            margin: a multiple of the tolerance for rounding; more than 1 where another process checks the result.
        """
        return bool(known) and missing == 0

    # ---------------------------------------------------------------------------------- calibration of the temperature

    def raw(self, tensors: Tensors) -> list[Output]:
        """For n images what temperatures act on, one array each: `calibrated` makes the outputs of it.

        By default it is the outputs at temperature 1.
        """
        return self.outputs(tensors, 1.0)

    def calibrated(self, raw: Sequence[Output], temperature: float) -> list[Output]:
        """The outputs at a temperature, of arrays from `raw` or `raw_of`: the same as by `outputs`."""
        return [self.combine([each], (1.0,), temperature) for each in raw]

    def raw_of(self, outputs: Sequence[Output]) -> list[Output]:
        """Arrays of which `calibrated` makes these outputs at temperature 1: an ensemble's, to calibrate them."""
        return list(outputs)

    def tempered(self, raw: Sequence[Output], temperature: float) -> list[Output]:
        """Arrays of which `calibrated` makes at temperature 1 what it makes of these at `temperature`."""
        return self.raw_of(self.calibrated(raw, temperature))

    def negative_log_likelihood(
        self,
        raw: Sequence[Output],  # noqa: ARG002 - by default there is nothing to fit
        truths: Sequence[Truth],  # noqa: ARG002
        temperature: float,  # noqa: ARG002
    ) -> float | None:
        """How surprising the truths of n images are, on average, if the outputs at this temperature are believed.

        Calibration chooses the temperature with the least. None if the kind has no temperature to fit.
        """
        return None

    # --------------------------------------------------------------------------------- predictions and their quality

    @abstractmethod
    def score(self, output: Output, kind: str) -> float:
        """How sure the output is, 0..1, by one of `scores`. Computed so that processors agree bit for bit."""

    @abstractmethod
    def predict(self, output: Output, limit: int) -> PredictionT:
        """The prediction, with at most `limit` alternatives where the kind has some."""

    @abstractmethod
    def loss(self, prediction: PredictionT, truth: Truth) -> float:
        """How wrong a prediction is, 0 (right) to 1."""

    @abstractmethod
    def disagreement(self, prediction: PredictionT, reference: PredictionT) -> float:
        """How far a prediction is from the reference stage's, 0 (the same) to 1; symmetric."""

    def confidence(self, prediction: PredictionT) -> float:  # noqa: ARG002 - for kinds that state one
        """The calibrated probability that the prediction is right, 0..1, for `min_confidence`.

        Raises:
            BadField: if the kind states none of a whole prediction.
        """
        raise BadField(f"min_confidence: answers of kind {self.name!r} have no confidence; choose another target")

    # ---------------------------------------------------------------------------------------- one image at the edge

    def accelerated(self, kernels: Kernels) -> Self:  # noqa: ARG002 - most kinds have no use for them
        """This kind, with native functions in place of NumPy's where it can use them."""
        return self

    def output(self, tensors: Tensors, row: int, temperature: float, to_image: ToImage | None = None) -> Output:
        """The output for one of n images, placed by `to_image`.

        Raises:
            BackendError: as `outputs`.
        """
        (output,) = self.outputs({name: tensor[row : row + 1] for name, tensor in tensors.items()}, temperature)
        return output if to_image is None else self.place(output, to_image)

    def judge(self, output: Output, limit: int, score: str, temperature: float = 1.0) -> Judged[PredictionT]:
        """The prediction of an output and its score, after calibration by a further temperature."""
        if temperature != 1.0:
            output = self.combine([output], (1.0,), temperature)
        return Judged(self.predict(output, limit), self.score(output, score))

    def judge_tensors(
        self,
        tensors: Tensors,
        row: int,
        limit: int,
        score: str,
        temperature: float,
        before: float = 1.0,
        to_image: ToImage | None = None,
    ) -> Judged[PredictionT]:
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

    def score_slope(self, kind: str) -> float:  # noqa: ARG002 - unknown by default
        """The most that a score changes where no value of the output changes by more than 1; +∞ if unknown."""
        return math.inf

    def steady(self, output: Output, variation: float) -> bool:  # noqa: ARG002 - unknown by default
        """Whether the prediction is the same if no value of the output changes by more than `variation` > 0."""
        return False

    # -------------------------------------------------------------------------------------------- labelled data sets

    def truth(self, annotation: Annotation) -> Truth:
        """The label of one image, from what a data set says is in it.

        Raises:
            ConfigError: if the data set lacks what this kind needs; says what that is.
        """
        raise NotImplementedError(f"kind {self.name!r} reads no labelled data sets: it has no `truth`")

    def truths(self, annotations: Iterable[Annotation]) -> list[Truth]:
        """The labels of images.

        Raises:
            ConfigError: as `truth`, with the number of the image.
        """
        found = []
        for number, annotation in enumerate(annotations):
            try:
                found.append(self.truth(annotation))
            except ConfigError as error:
                raise ConfigError(f"image {number}: {error}") from None
        return found

    def measures(
        self,
        outputs: Sequence[Output],  # noqa: ARG002 - by default there are none
        truths: Sequence[Truth],  # noqa: ARG002
    ) -> dict[str, float]:
        """Further figures that describe the outputs for a data set, by name, such as average precision."""
        return {}

    # ---------------------------------------------------------------------------------------------------- the wire

    def encode_reply(self, prediction: PredictionT) -> dict[str, Any]:
        """The fields that the datacenter's reply to an escalation gets; `decode_reply` reads them.

        None has the name of a field of `hawkvision.tasks.serving.replies`.
        """
        fields: dict[str, Any] = msgspec.to_builtins(prediction)
        return fields

    def decode_reply(self, reply: bytes) -> PredictionT:
        """The prediction in the JSON object of a reply; other fields are ignored.

        Raises:
            msgspec.ValidationError, ValueError: naming the field that is missing or malformed.
        """
        return msgspec.json.decode(reply, type=self.prediction)

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

    # ----------------------------------------------------------------------------------------------- many at a time

    def score_all(self, outputs: Sequence[Output], kind: str) -> NDArray[np.float64]:
        """The score of each output (n,)."""
        return np.array([self.score(output, kind) for output in outputs], np.float64)

    def losses(self, outputs: Sequence[Output], truths: Iterable[Truth]) -> NDArray[np.float64]:
        """The loss of each output's prediction (n,)."""
        return np.array([self.loss(self.predict(o, 1), t) for o, t in zip(outputs, truths, strict=True)], np.float64)

    def disagreements(self, outputs: Sequence[Output], references: Sequence[Output]) -> NDArray[np.float64]:
        """The disagreement of each output's prediction with its reference's (n,)."""
        pairs = zip(outputs, references, strict=True)
        return np.array([self.disagreement(self.predict(a, 1), self.predict(b, 1)) for a, b in pairs], np.float64)
