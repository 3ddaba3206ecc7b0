"""The contracts of backends and of kinds of tasks as tests for pytest: subclass one and say what it is about.

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def make_backend(self) -> Callable[[], Backend]:
            return lambda: MyBackend("model.bin")

    class TestMyKind(TaskKindConformance):
        def make_kind(self) -> TaskKind:
            return MyKind(("no", "yes"), {})
        ...

For those who write backends and kinds; the only module of the library that imports pytest and hypothesis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, ManifestError
from hawkvision.core.types import Answer, Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, joined
from hawkvision.tasks.kind import Output, TaskKind, Truth
from hawkvision.tasks.serving.replies import FIELDS


def random_images(backend: Backend, n: int, seed: int = 0) -> Pixels:
    """`n` images of noise of the backend's input shape, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, (n, *backend.input_shape), dtype=np.uint8)


def assert_same(found: Tensors, expected: Tensors) -> None:
    """Fail unless the tensors are equal bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


class BackendConformance:
    """Tests that every `Backend` must pass."""

    atol: ClassVar[float] = 1e-4
    """How far an image's numbers may differ between batch sizes: kernels may sum in another order for each."""

    def assert_close(self, found: Tensors, expected: Tensors) -> None:
        """Fail unless the tensors are equal within `atol`."""
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, rtol=0, atol=self.atol, err_msg=name)

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        """Override: a function that opens a fresh backend, the same model each time."""
        raise NotImplementedError(f"{type(self).__name__} must override the fixture make_backend")

    @pytest.fixture
    def backend(self, make_backend: Callable[[], Backend]) -> Iterator[Backend]:
        """A fresh backend, closed after the test."""
        backend = make_backend()
        yield backend
        backend.close()

    def test_says_what_it_takes_and_gives(self, backend: Backend) -> None:
        """The input shape and the outputs' are positive and consistent with the protocol."""
        assert isinstance(backend, Backend)
        height, width, channels = backend.input_shape
        assert height > 0
        assert width > 0
        assert channels == 3
        assert backend.outputs
        assert all(size is None or size > 0 for shape in backend.outputs.values() for size in shape)

    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_tensors_are_float32_with_one_part_per_image(self, backend: Backend, n: int) -> None:
        """(n, ...) of finite float32, as `outputs` says."""
        tensors = backend.infer(random_images(backend, n))
        assert tensors.keys() == backend.outputs.keys()
        for name, shape in backend.outputs.items():
            assert len(tensors[name]) == n
            assert len(tensors[name].shape) == 1 + len(shape)
            sizes = zip(shape, tensors[name].shape[1:], strict=True)
            assert all(expected in (None, found) for expected, found in sizes)
            assert tensors[name].dtype == np.float32
            assert np.isfinite(tensors[name]).all()

    def test_batch_gives_each_image_what_it_gets_alone(self, backend: Backend) -> None:
        """Row i of a batch equals the answer to image i, within `atol`."""
        batch = random_images(backend, 4)
        alone = joined([backend.infer(batch[i : i + 1]) for i in range(4)])
        self.assert_close(backend.infer(batch), alone)

    def test_order_of_images_is_kept(self, backend: Backend) -> None:
        """Reversing the batch reverses the tensors."""
        batch = random_images(backend, 4)
        forward = {name: tensor[::-1] for name, tensor in backend.infer(batch).items()}
        self.assert_close(backend.infer(np.ascontiguousarray(batch[::-1])), forward)

    def test_same_batch_gives_same_tensors(self, backend: Backend) -> None:
        """Two runs agree bit for bit."""
        batch = random_images(backend, 3)
        assert_same(backend.infer(batch), backend.infer(batch))

    def test_two_openings_agree(self, make_backend: Callable[[], Backend], backend: Backend) -> None:
        """A second backend over the same model gives the same tensors."""
        batch = random_images(backend, 2)
        second = make_backend()
        assert_same(second.infer(batch), backend.infer(batch))
        second.close()

    def test_four_threads_get_what_one_gets(self, backend: Backend) -> None:
        """Concurrent calls do not disturb one another."""
        batches = [random_images(backend, 1 + seed % 3, seed) for seed in range(16)]
        expected = [backend.infer(batch) for batch in batches]
        with ThreadPoolExecutor(4) as pool:
            for found, wanted in zip(pool.map(backend.infer, batches), expected, strict=True):
                assert_same(found, wanted)

    def test_non_contiguous_batch_is_read_right(self, backend: Backend) -> None:
        """A strided view counts as what it shows."""
        wide = random_images(backend, 6)
        assert_same(backend.infer(wide[::2]), backend.infer(wide[::2].copy()))

    @pytest.mark.parametrize("change", ["height", "width", "channels", "rank", "empty"])
    def test_wrong_shape_is_refused(self, backend: Backend, change: str) -> None:
        """Any other shape is a BackendError, and the next call works."""
        height, width, channels = backend.input_shape
        shape = {
            "height": (1, height + 1, width, channels),
            "width": (1, height, width - 1, channels),
            "channels": (1, height, width, 1),
            "rank": (height, width, channels),
            "empty": (0, height, width, channels),
        }[change]
        with pytest.raises(BackendError):
            backend.infer(np.zeros(shape, np.uint8))
        assert all(len(tensor) == 1 for tensor in backend.infer(random_images(backend, 1)).values())

    @pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int64])
    def test_wrong_dtype_is_refused(self, backend: Backend, dtype: type[np.generic]) -> None:
        """Nothing is converted silently: float images are on an unknown scale."""
        wrong: NDArray[Any] = np.zeros((1, *backend.input_shape), dtype)
        with pytest.raises(BackendError):
            backend.infer(wrong)

    def test_input_is_left_as_it_was(self, backend: Backend) -> None:
        """The caller's array is not written to; a read-only one will do."""
        batch = random_images(backend, 2)
        before = batch.copy()
        batch.setflags(write=False)
        backend.infer(batch)
        np.testing.assert_array_equal(batch, before)

    def test_output_is_the_callers_to_keep(self, backend: Backend) -> None:
        """Later calls do not overwrite earlier tensors, nor does writing to them change later ones."""
        first = backend.infer(random_images(backend, 2, seed=1))
        kept = {name: tensor.copy() for name, tensor in first.items()}
        second = backend.infer(random_images(backend, 2, seed=2))
        assert_same(first, kept)
        for name, tensor in first.items():
            assert not np.shares_memory(tensor, second[name])
            tensor[:] = 0
        assert_same(backend.infer(random_images(backend, 2, seed=1)), kept)

    def test_closed_backend_refuses_to_infer(self, make_backend: Callable[[], Backend]) -> None:
        """After close, infer raises BackendError; a second close does nothing."""
        backend = make_backend()
        batch = random_images(backend, 1)
        backend.close()
        backend.close()
        with pytest.raises(BackendError):
            backend.infer(batch)


_ELEMENTS: Final[dict[str, type | tuple[type, ...]]] = {"BYTES": str, "INT64": int, "FP32": (int, float)}
_drawn = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow], deadline=None)
"""Several subclasses run the same test."""


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
        """Of finite float32, the same in a batch as alone and at each time."""
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
