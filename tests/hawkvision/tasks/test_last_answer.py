"""The last answer before a deadline: outputs as they travel, and the ensemble of both tiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.escalation_api import EscalationReply, EscalationTiming, IntermediateResult, PartialEnsemble
from hawkvision.core.types import Output
from hawkvision.tasks.detection import DetectionKind
from hawkvision.tasks.kind import PACKED_BYTES, TaskKind
from hawkvision.tasks.last_answer import last_answer
from hawkvision.tasks.multi_label import MultiLabelKind
from hawkvision.tasks.serving import decode_reply, encode_reply
from hawkvision.transport.protocol.frames import INTERIM_ROOM
from tests.hawkvision.tasks.classes import classes

STEP = 1 / 65535
LABELS = tuple(f"label {number}" for number in range(80))
KINDS: dict[str, TaskKind[Any]] = {
    "classification": classes(1000),
    "multi_label": MultiLabelKind(LABELS, {}),
    "detection": DetectionKind(LABELS, {"threshold": 0.1}),
}


def drawn(name: str, seed: int, many: int = 40) -> Output:
    """An output as a model may compute it."""
    draws = np.random.default_rng(seed)
    if name == "detection":
        corner, side = draws.uniform(0.0, 0.8, (many, 2)), draws.uniform(1e-5, 0.2, (many, 2))
        score, label = np.sort(draws.random((many, 1)), axis=0)[::-1], draws.integers(0, 80, (many, 1))
        return np.concatenate([corner, corner + side, score, label], axis=1).astype(np.float32)
    if name == "classification":
        return draws.dirichlet(np.full(1000, 0.01)).astype(np.float32)
    return draws.random(80).astype(np.float32)


@pytest.mark.parametrize("name", KINDS)
@given(seed=st.integers(0, 10_000))
def test_an_output_travels_with_what_decides_a_prediction(name: str, seed: int) -> None:
    kind = KINDS[name]
    output = drawn(name, seed)
    packed = kind.pack(output)
    read = kind.unpack(packed)
    assert len(packed) <= PACKED_BYTES
    assert read == pytest.approx(output, abs=1e-3 if name == "classification" else 1.01 * STEP)


@pytest.mark.parametrize("name", KINDS)
def test_bytes_that_are_no_output_are_refused(name: str) -> None:
    kind = KINDS[name]
    for broken in (kind.pack(drawn(name, 1))[:-1], b"\xff" * 12):
        with pytest.raises(ValueError, match=r"expected|buffer size"):
            kind.unpack(broken)


@pytest.mark.parametrize("name", KINDS)
def test_a_reply_of_some_members_fits_a_datagram_and_is_read_with_its_prediction(name: str) -> None:
    kind = KINDS[name]
    output = drawn(name, 2, many=200)
    one_class = kind.predict(output, 1) if name == "classification" else None
    over = None if one_class is None else IntermediateResult(one_class, 0.123456789, "f" * 64)
    part = PartialEnsemble(("efficientnet_lite0_int8", "efficientnet_lite1_int8"), output)
    timing = EscalationTiming(1.234, 12.345, 123.456, 1234.567, 123.456)
    reply = EscalationReply(kind.predict(output, 3), "reference", timing, 16, 0.123456789, over, 0.5432, 85, part)
    body = encode_reply(kind, reply)
    read = decode_reply(kind, body, 3)
    assert len(body) <= INTERIM_ROOM
    assert read.part is not None
    assert (read.part.members, read.complete, read.fingerprint) == (part.members, False, None)
    assert read.prediction == kind.predict(read.part.output, 3)
    assert kind.disagreement(read.prediction, read.prediction) == 0.0


@pytest.mark.parametrize("name", ["classification", "multi_label"])
def test_all_models_of_both_tiers_count_alike(name: str) -> None:
    kind = KINDS[name]
    a, b, c = (drawn(name, seed) for seed in range(3))
    part = PartialEnsemble(("b", "c"), kind.combine([b, c], (1.0, 1.0), 1.0))
    found = last_answer(kind, {"a": (a, 1.0)}, part, whole=True)
    assert found == pytest.approx(kind.combine([a, b, c], (1.0, 1.0, 1.0), 1.0), abs=1e-6)


def test_boxes_are_fused_as_in_the_reference_stage() -> None:
    kind = KINDS["detection"]
    a, b = drawn("detection", 1), drawn("detection", 2)
    found = last_answer(kind, {"a": (a, 1.0)}, PartialEnsemble(("b",), b), whole=True)
    assert found is not None
    assert np.array_equal(found, kind.combine([a, b], (1.0, 1.0), 1.0))


def test_members_of_an_edge_ensemble_keep_their_weights() -> None:
    kind = KINDS["multi_label"]
    a, b, c = (drawn("multi_label", seed) for seed in range(3))
    found = last_answer(kind, {"a": (a, 3.0), "b": (b, 1.0)}, PartialEnsemble(("c",), c), whole=True)
    assert found == pytest.approx((2 * (0.75 * a + 0.25 * b) + c) / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("members", "whole", "expected"),
    [
        (("a", "c"), True, "b theirs theirs"),  # the tier ran a as well, and the mirror image perhaps
        (("a", "c"), False, "a b theirs"),  # of a worse image; c is the only one that is new
        (("a", "b"), True, "theirs"),
        (("a", "b"), False, ""),
    ],
)
def test_a_model_of_both_tiers_counts_once(members: tuple[str, ...], whole: bool, expected: str) -> None:
    kind = KINDS["classification"]
    outputs = {"a": drawn("classification", 1), "b": drawn("classification", 2)}
    theirs = drawn("classification", 3)
    own = {name: (output, 1.0) for name, output in outputs.items()}
    found = last_answer(kind, own, PartialEnsemble(members, theirs), whole=whole)
    if not expected:
        assert found is None
        return
    averaged = [{**outputs, "theirs": theirs}[name] for name in expected.split()]
    assert found == pytest.approx(np.mean(averaged, axis=0), abs=1e-6)
