"""The contract of kinds of tasks as tests for pytest: subclass it and say what it is about.

    class TestMyKind(TaskKindConformance):
        def make_kind(self) -> TaskKind:
            return MyKind(("no", "yes"), {})
        ...

For those who write kinds; the only module of the library that imports pytest and hypothesis.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import BackendError, ConfigError, ManifestError
from hawkvision.core.types import Answer, Tensors
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.tasks.kind import PACKED_BYTES, Output, TaskKind, Truth
from hawkvision.tasks.serving import FIELDS

_ELEMENTS: Final[dict[str, type | tuple[type, ...]]] = {"BYTES": str, "INT64": int, "FP32": (int, float)}
_drawn = settings(
    max_examples=max(1, settings.default.max_examples // 2) if settings.default else 50,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    deadline=None,
)
"""Several subclasses run the same test. There are many tests, so that each draws half as many examples as others."""


class TaskKindConformance:
    """Tests that every `TaskKind` must pass. Subclasses say how to draw what the kind works with."""

    def make_kind(self) -> TaskKind[Any]:
        """Override: the kind with labels and options of some task."""
        raise NotImplementedError(f"{type(self).__name__} must override make_kind")

    def tensors(self, n: int) -> st.SearchStrategy[Tensors]:
        """Override: what decoders may give for n images."""
        raise NotImplementedError(f"{type(self).__name__} must override tensors")

    def truths(self) -> st.SearchStrategy[Truth]:
        """Override: labels of an image, in every form that `loss` takes."""
        raise NotImplementedError(f"{type(self).__name__} must override truths")

    def counterexample(self) -> tuple[Any, Any, Truth]:
        """Override if not `agreement_bounds_drop`: predictions a, b and a truth t whose losses differ by more."""
        raise NotImplementedError(f"{type(self).__name__} must override counterexample")

    def outputs(self, temperature: float = 1.0) -> st.SearchStrategy[Output]:
        """Outputs of one model for one image."""
        return self.tensors(1).map(lambda tensors: self.make_kind().outputs(tensors, temperature)[0])

    def combined(self) -> st.SearchStrategy[Output]:
        """Outputs of one to three members for one image."""
        members = st.lists(self.outputs(), min_size=1, max_size=3)
        return members.map(lambda each: self.make_kind().combine(each, (1.0,) * len(each), 1.0))

    def predictions(self) -> st.SearchStrategy[Any]:
        """Predictions of models and of ensembles."""
        return self.combined().map(lambda output: self.make_kind().predict(output, 5))

    # ------------------------------------------------------------------------------------------------------ facts

    def test_states_what_it_is(self) -> None:
        """Its class states its name, its scores and whether agreement bounds a drop; an instance is of one task."""
        kind = self.make_kind()
        assert isinstance(kind.name, str)
        assert kind.scores
        assert len(set(kind.scores)) == len(kind.scores)
        assert kind.agreement_bounds_drop in (True, False)
        assert issubclass(kind.prediction, msgspec.Struct)

    def test_unknown_options_are_refused_by_name(self) -> None:
        """A mistyped option must not be ignored."""
        kind = self.make_kind()
        with pytest.raises(ManifestError, match="no_such_option"):
            type(kind)(kind.labels, {**kind.options, "no_such_option": 1})

    @_drawn
    @given(st.data(), st.integers(1, 3))
    def test_tensors_are_those_that_it_declares(self, data: st.DataObject, n: int) -> None:
        """By name, of the stated type and shape, the same prediction giving the same numbers wherever it stands."""
        kind, predictions = self.make_kind(), [data.draw(self.predictions()) for _ in range(n)]
        found = kind.tensors(predictions)
        assert found.keys() == kind.wire_tensors.keys()
        for name, (datatype, shape, _) in kind.wire_tensors.items():
            tensor = found[name]
            assert tensor.shape[0] == n
            assert len(tensor.shape) == len(shape)
            assert all(want in (-1, is_) for want, is_ in zip(shape, tensor.shape, strict=True))
            assert len(tensor.values) == math.prod(tensor.shape)
            assert all(isinstance(each, _ELEMENTS[datatype]) for each in tensor.values)

    # ---------------------------------------------------------------------------------------------------- outputs

    @_drawn
    @given(st.data(), st.integers(1, 4), st.floats(0.2, 5.0))
    def test_each_image_has_an_output_of_its_own(self, data: st.DataObject, n: int, temperature: float) -> None:
        """Outputs are finite float32, the same in a batch as alone and at each time."""
        kind, tensors = self.make_kind(), data.draw(self.tensors(n))
        found = kind.outputs(tensors, temperature)
        assert len(found) == n
        for i, output in enumerate(found):
            alone = kind.outputs({name: tensor[i : i + 1] for name, tensor in tensors.items()}, temperature)
            assert output.dtype == np.float32
            assert np.isfinite(output).all()
            np.testing.assert_array_equal(output, alone[0])

    def test_missing_tensors_are_an_error_of_the_backend(self) -> None:
        """Which a manifest with the wrong decoder causes."""
        with pytest.raises(BackendError):
            self.make_kind().outputs({}, 1.0)

    @_drawn
    @given(st.data())
    def test_an_ensemble_of_one_is_its_member(self, data: st.DataObject) -> None:
        """Bit for bit."""
        kind, output = self.make_kind(), data.draw(self.outputs())
        np.testing.assert_array_equal(kind.combine([output], (1.0,), 1.0), output)

    @_drawn
    @given(st.data(), st.floats(0.2, 5.0))
    def test_members_that_agree_are_not_contradicted(self, data: st.DataObject, weight: float) -> None:
        """An ensemble whose members all say the same predicts that, whatever their weights."""
        kind, output = self.make_kind(), data.draw(self.outputs())
        both = kind.combine([output, output], (1.0, weight), 1.0)
        assert both.dtype == np.float32
        assert np.isfinite(both).all()
        assert kind.disagreement(kind.predict(both, 5), kind.predict(output, 5)) <= self.fusion_tolerance

    fusion_tolerance: ClassVar[float] = 0.0
    """How far the prediction of two members that agree may be from theirs; above 0 where objects are fused."""

    @_drawn
    @given(st.data())
    def test_a_mirror_image_of_a_mirror_image_is_the_image(self, data: st.DataObject) -> None:
        """Within rounding."""
        kind, output = self.make_kind(), data.draw(self.outputs())
        np.testing.assert_allclose(kind.unmirror(kind.unmirror(output)), output, rtol=0, atol=1e-6)

    @_drawn
    @given(st.data())
    def test_places_stay_where_input_and_image_are_the_same(self, data: st.DataObject) -> None:
        """An input that shows exactly the image."""
        kind, output = self.make_kind(), data.draw(self.outputs())
        placed = kind.place(output, lambda boxes: np.asarray(boxes, np.float64))
        if not kind.located:
            np.testing.assert_array_equal(placed, output)
        assert kind.disagreement(kind.predict(placed, 5), kind.predict(output, 5)) == 0.0

    @_drawn
    @given(st.data())
    def test_what_is_decided_stays_whatever_is_added(self, data: st.DataObject) -> None:
        """Members that are not computed could not have changed the prediction."""
        kind = self.make_kind()
        known = data.draw(st.lists(self.outputs(), min_size=1, max_size=3))
        missing = data.draw(st.lists(self.outputs(), max_size=2))
        assert not kind.decided([], len(missing))
        if kind.decided(known, len(missing)):
            before, after = (kind.combine(each, (1.0,) * len(each), 1.0) for each in (known, [*known, *missing]))
            assert kind.disagreement(kind.predict(before, 5), kind.predict(after, 5)) == 0.0

    @_drawn
    @given(st.data())
    def test_scores_are_fractions_and_repeatable(self, data: st.DataObject) -> None:
        """Bit for bit, also from another instance, because a certificate compares them with its threshold."""
        output = data.draw(self.combined())
        for score in self.make_kind().scores:
            found = self.make_kind().score(output, score)
            assert 0.0 <= found <= 1.0, score
            assert self.make_kind().score(output.copy(), score) == found

    # ------------------------------------------------------------------------------------------ predictions, losses

    @_drawn
    @given(st.data())
    def test_replies_carry_predictions_unchanged(self, data: st.DataObject) -> None:
        """From tier to tier, beside fields that others add."""
        kind, prediction = self.make_kind(), data.draw(self.predictions())
        fields = kind.encode_reply(prediction)
        assert not FIELDS & fields.keys()
        assert kind.decode_reply(msgspec.json.encode({"model": "m", "zzz": [1], **fields})) == prediction

    @_drawn
    @given(st.data())
    def test_outputs_travel_to_be_combined_with_others(self, data: st.DataObject) -> None:
        """What some members computed counts, beside the edge's models, where the deadline comes before the others."""
        kind, output = self.make_kind(), data.draw(self.outputs())
        packed = kind.pack(output)
        assert len(packed) <= PACKED_BYTES
        together = kind.combine([output, kind.unpack(packed)], (1.0, 1.0), 1.0)
        prediction = kind.predict(together, 5)
        assert kind.decode_reply(msgspec.json.encode(kind.encode_reply(prediction))) == prediction

    @_drawn
    @given(st.data())
    def test_predictions_that_are_only_compared_disagree_as_whole_ones(self, data: st.DataObject) -> None:
        """What an intermediate stage found travels beside the answer of the reference stage."""
        kind, prediction, other = self.make_kind(), data.draw(self.predictions()), data.draw(self.predictions())
        fields = kind.encode_compared(prediction)
        assert not FIELDS & fields.keys()
        read = kind.decode_compared(msgspec.json.encode({**fields, "score": 0.5, "fingerprint": None}))
        assert kind.disagreement(read, other) == kind.disagreement(prediction, other)

    @_drawn
    @given(st.data())
    def test_answers_carry_predictions_as_json(self, data: st.DataObject) -> None:
        """In fields that no answer has already."""
        fields = data.draw(self.predictions()).to_json()
        read = json.loads(json.dumps(fields, allow_nan=False))
        assert isinstance(msgspec.convert(read, self.make_kind().prediction), self.make_kind().prediction)
        common = set(Answer.__dataclass_fields__) - {"prediction", "top_k"}
        assert not common & fields.keys()

    @_drawn
    @given(st.data())
    def test_broken_replies_are_refused(self, data: st.DataObject) -> None:
        """As an error that names the field; never as an error of another kind, or as a prediction that is none."""
        kind, prediction = self.make_kind(), data.draw(self.predictions())
        fields = msgspec.json.decode(msgspec.json.encode(kind.encode_reply(prediction)))
        reply = msgspec.json.encode(_broken(data, fields))
        try:
            read = kind.decode_reply(reply)
        except (msgspec.MsgspecError, ValueError):
            return
        assert kind.disagreement(read, read) == 0.0
        assert 0.0 <= kind.disagreement(read, prediction) <= 1.0
        json.dumps(read.to_json(), allow_nan=False)

    @_drawn
    @given(st.data())
    def test_losses_and_disagreements_are_fractions(self, data: st.DataObject) -> None:
        """A disagreement is symmetric, and 0 of a prediction with itself."""
        kind = self.make_kind()
        a, b = data.draw(self.predictions()), data.draw(self.predictions())
        assert 0.0 <= kind.loss(a, data.draw(self.truths())) <= 1.0
        assert 0.0 <= kind.disagreement(a, b) <= 1.0
        assert kind.disagreement(a, b) == kind.disagreement(b, a)
        assert kind.disagreement(a, a) == 0.0

    @_drawn
    @given(st.data(), st.integers(1, 4))
    def test_many_at_a_time_are_as_one_by_one(self, data: st.DataObject, n: int) -> None:
        """Losses and disagreements of outputs are those of their predictions."""
        kind = self.make_kind()
        a, b = (data.draw(st.lists(self.combined(), min_size=n, max_size=n)) for _ in range(2))
        truths = data.draw(st.lists(self.truths(), min_size=n, max_size=n))
        predicted, references = ([kind.predict(each, 1) for each in outputs] for outputs in (a, b))
        assert kind.losses(a, truths).tolist() == [kind.loss(*each) for each in zip(predicted, truths, strict=True)]
        pairs = zip(predicted, references, strict=True)
        assert kind.disagreements(a, b).tolist() == [kind.disagreement(*each) for each in pairs]

    @_drawn
    @given(st.data())
    def test_agreement_bounds_the_drop_where_that_is_said(self, data: st.DataObject) -> None:
        """Accuracy drops may be certified without labels exactly where it does."""
        kind = self.make_kind()
        if kind.agreement_bounds_drop:
            a, b, truth = data.draw(self.predictions()), data.draw(self.predictions()), data.draw(self.truths())
            assert kind.loss(a, truth) - kind.loss(b, truth) <= kind.disagreement(a, b) + 1e-12
        else:
            a, b, truth = self.counterexample()
            assert kind.loss(a, truth) - kind.loss(b, truth) > kind.disagreement(a, b)

    # -------------------------------------------------------------------------------------------------- calibration

    @_drawn
    @given(st.data(), st.floats(0.2, 5.0))
    def test_what_calibration_computes_is_what_is_served(self, data: st.DataObject, temperature: float) -> None:
        """Outputs by way of `raw` are those of `outputs`; an ensemble's output can be taken apart again."""
        kind, tensors, output = self.make_kind(), data.draw(self.tensors(2)), data.draw(self.combined())
        served = kind.outputs(tensors, temperature)
        for found, wanted in zip(kind.calibrated(kind.raw(tensors), temperature), served, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        again = kind.calibrated(kind.raw_of([output]), 1.0)[0]
        np.testing.assert_allclose(again, output, rtol=0, atol=1e-5)
        for score in kind.scores:
            assert kind.score_all([output, served[0]], score).tolist() == [
                kind.score(each, score) for each in (output, served[0])
            ]

    @_drawn
    @given(st.data(), st.floats(0.2, 5.0))
    def test_likelihoods_can_be_compared(self, data: st.DataObject, temperature: float) -> None:
        """They are finite, where the kind has a temperature to fit."""
        kind, raw = self.make_kind(), self.make_kind().raw(data.draw(self.tensors(3)))
        truths = data.draw(st.lists(self.truths(), min_size=3, max_size=3))
        found = kind.negative_log_likelihood(raw, truths, temperature)
        assert found is None or math.isfinite(found)

    @_drawn
    @given(st.data())
    def test_labels_of_data_sets_are_read_or_refused(self, data: st.DataObject) -> None:
        """Images with one class, with several, and with boxes; without `truth` nothing is certified with labels."""
        kind, prediction = self.make_kind(), data.draw(self.predictions())
        if type(kind).truth is TaskKind.truth:
            return
        one, several = np.array([0]), np.array([0, 1])
        boxes = np.array([[0.1, 0.1, 0.4, 0.5], [0.5, 0.2, 0.9, 0.8]], np.float32)
        truths = []
        for annotation in (Annotation(one), Annotation(several), Annotation(several, boxes)):
            with contextlib.suppress(ConfigError):
                truths.append(kind.truth(annotation))
        assert truths, "the kind reads none of these"
        assert all(0.0 <= kind.loss(prediction, truth) <= 1.0 for truth in truths)

    @_drawn
    @given(st.data())
    def test_confidence_is_a_fraction_where_there_is_one(self, data: st.DataObject) -> None:
        """A kind without one says so by NotImplementedError."""
        try:
            found = self.make_kind().confidence(data.draw(self.predictions()))
        except NotImplementedError:
            return
        assert 0.0 <= found <= 1.0


def _broken(data: st.DataObject, value: Any) -> Any:
    """A JSON value with something of it replaced or left out."""
    anything = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.booleans()):
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: _broken(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _broken(data, value[at]), *value[at + 1 :]]
    return data.draw(anything | st.lists(anything, max_size=3) | st.dictionaries(st.text(max_size=3), anything))
