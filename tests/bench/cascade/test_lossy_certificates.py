"""The study of received images: links lose the stated share, and a broken guarantee is detected."""

from __future__ import annotations

import numpy as np
import pytest

from hawkvision.cascade.policy import Policy
from hawkvision.core.types import MaxAccuracyDrop, Received
from hawkvision.transport.coding.image_coding import Plan
from tests.bench.cascade.lossy_certificates import (
    RATES,
    TARGETS,
    CertificateLink,
    Crossed,
    Loss,
    judged,
    links,
    violations,
)
from tests.hawkvision.cascade.synthetic import HARM, make_received_looks, make_received_profile

POLICY = Policy(make_received_profile(), "small", "large")


def crossed(harm: float, received: Received, *, edge_is_right: bool = True) -> Crossed:
    looks = make_received_looks(harm, 1_000, seed=21)
    truth = np.array(looks.truths)
    edge, best, reference = (np.array(each) for each in (looks.edge, looks.best, looks.reference))
    right = edge.argmax(axis=1) == truth
    return Crossed(
        CertificateLink(0.1, 1.0, Plan(80, 0.2), planned=True), 1.0, (received,) * len(truth), edge,
        right if edge_is_right else np.zeros_like(right), best.argmax(axis=1) == truth,
        reference.argmax(axis=1) == truth,
    )  # fmt: skip


@pytest.mark.parametrize("burst", [1.0, 4.0])
@pytest.mark.parametrize("loss", [0.05, 0.3, 0.7])
def test_a_link_loses_what_it_says_in_runs_as_long_as_it_says(loss: float, burst: float) -> None:
    count = 40_000
    kept = CertificateLink(loss, burst, Plan(80, 0.2), planned=True).kept(count, np.random.default_rng(3))
    lost = np.ones(count, np.bool_)
    lost[kept] = False
    runs = int((np.diff(lost.astype(np.int8)) == 1).sum())
    assert lost.mean() == pytest.approx(loss, rel=0.1)
    assert lost.sum() / runs == pytest.approx(max(burst, 1.0 / (1.0 - loss)), rel=0.1)


def test_every_rate_is_met_with_and_without_a_plan() -> None:
    found = links()
    assert {(link.loss, link.planned) for link in found if link.loss} == {
        (loss, planned) for loss in RATES[1:] for planned in (True, False)
    }
    assert len({str(link) for link in found}) == len(found)


def test_a_drop_within_its_bound_is_no_excess_and_a_large_one_is() -> None:
    assert Loss(8, 4, 400).excess_p(0.01) == 1.0
    assert Loss(14, 8, 400).excess_p(0.01) > 0.05
    assert Loss(60, 10, 400).excess_p(0.02) < 1e-4


@pytest.mark.parametrize(("rate", "bound"), [(0.05, 0.01), (0.2, 0.04)])
def test_the_test_of_excess_keeps_its_level(rate: float, bound: float) -> None:
    rng = np.random.default_rng(5)
    drawn = rng.multinomial(400, [(rate + bound) / 2, (rate - bound) / 2, 1 - rate], size=300)
    rejected = np.mean([Loss(int(lost), int(gained), 400).excess_p(bound) < 0.05 for lost, gained, _ in drawn])
    assert rejected < 0.08


def test_guarantees_that_are_kept_are_no_violations() -> None:
    cells = [
        judged(POLICY, 1.0, crossed(HARM[place], Received(place[1], place[0])), target)
        for place in ((80, 1.0), (80, 0.75), (27, 1.0))
        for target in TARGETS
    ]
    assert any(cell.held for cell in cells)
    assert violations(cells) == []


def test_a_gate_that_believes_wrong_answers_is_found_out() -> None:
    cell = judged(POLICY, 1.0, crossed(0.05, Received(1.0, 80), edge_is_right=False), MaxAccuracyDrop(0.02))
    assert len(violations([cell])) == 1
