"""What a kind of task computes, and how good that is: the part of the interface that certificates rest on.

`hawkvision.tasks.kind` adds what serving needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import Output, Prediction, Tensors, ToImage
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.models.input_spec import Weights

Truth: TypeAlias = Any
"""The label of one image in the form that the kind's `loss` takes: a class index, boxes, counts, a set of labels."""

PredictionT = TypeVar("PredictionT", bound=Prediction)
OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


class MeasuredKind(ABC, Generic[PredictionT]):
    """What a kind computes, with the labels and options of one task's manifest; the base of `TaskKind`."""

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
    one_class: ClassVar[bool] = False
    """Whether one class is all that a label says of an image, and predictions have its `index`."""
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

    def calibrated_after(self, raw: Sequence[Output], before: float, temperature: float) -> list[Output]:
        """The outputs at `temperature` of an ensemble's first member that answers alone, `before` being its own.

        The same as by `TaskKind.judge_tensors`.
        """
        return self.calibrated(raw, before * temperature)

    def recalibrated(self, outputs: Sequence[Output], temperature: float) -> list[Output]:
        """Outputs of an ensemble at a further temperature, the same as by `TaskKind.judge`."""
        return [each if temperature == 1.0 else self.combine([each], (1.0,), temperature) for each in outputs]

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
