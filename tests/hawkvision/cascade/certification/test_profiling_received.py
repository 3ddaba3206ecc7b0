"""Certificates of received images: against the original, with what escalating gives up on the way."""

from __future__ import annotations

import numpy as np
import pytest

from hawkvision.cascade.certification.profile import Certificate, threshold_value
from hawkvision.cascade.certification.profiling_received import ReceivedPredictions
from hawkvision.guarantee.bounds import drop_upper_bound, paired_exact_p
from tests.hawkvision.cascade.synthetic import make_condition, make_received_looks

N = 1_600
CERTIFYING = np.arange(N // 4, N)


def given_up(looks: ReceivedPredictions, temperature: float, certificate: Certificate) -> tuple[int, int]:
    """Losses and gains against the original if the certificate's threshold accepts and the rest is escalated."""
    edge = looks.edge_stage("top1", temperature)
    accepted = edge.scores >= threshold_value(certificate.threshold)
    served = np.where(accepted, edge.losses, looks.kind.losses(looks.best, looks.truths))
    reference = looks.kind.losses(looks.reference, looks.truths)
    return int((served > reference).sum()), int((served < reference).sum())


@pytest.mark.parametrize("harm", [0.05, 0.4, 1.0])
def test_what_is_certified_counts_what_escalating_gives_up(harm: float) -> None:
    condition, looks = make_condition(80, 0.75, harm), make_received_looks(harm, N).part(CERTIFYING)
    assert condition.certificates
    for certificate in condition.certificates:
        lost, gained = given_up(looks, condition.edge_temperature, certificate)
        assert paired_exact_p(lost, gained, len(CERTIFYING), certificate.max_drop) <= certificate.delta
        assert certificate.observed_drop == pytest.approx((lost - gained) / len(CERTIFYING), abs=1e-6)


def test_no_drop_is_certified_that_escalating_everything_exceeds() -> None:
    looks, condition = make_received_looks(1.0, N).part(CERTIFYING), make_condition(80, 0.75, 1.0)
    served, reference = (looks.kind.losses(each, looks.truths) for each in (looks.best, looks.reference))
    lost, gained = int((served > reference).sum()), int((served < reference).sum())
    differing = int(looks.kind.disagreements(looks.best, looks.reference).sum())
    bound = drop_upper_bound(lost, gained, len(CERTIFYING), differing=differing)
    assert condition.best.max_drop == pytest.approx(bound, abs=1e-4)
    assert min(c.max_drop for c in condition.certificates) > (lost - gained) / len(CERTIFYING)


def test_accepting_is_weighed_against_the_best_stage_on_what_was_received() -> None:
    harm = 1.0
    condition, looks = make_condition(80, 0.75, harm), make_received_looks(harm, N).part(CERTIFYING)
    edge = looks.edge_stage("top1", condition.edge_temperature)
    more = edge.losses - looks.kind.losses(looks.best, looks.truths)
    assert min(c.max_drop for c in condition.accept_certificates) < min(c.max_drop for c in condition.certificates)
    for certificate in condition.accept_certificates:
        accepted = edge.scores >= threshold_value(certificate.threshold)
        lost, gained = int((more[accepted] > 0).sum()), int((more[accepted] < 0).sum())
        assert paired_exact_p(lost, gained, len(CERTIFYING), certificate.max_drop) <= certificate.delta


def test_where_the_edge_is_not_to_be_believed_only_escalating_is_certified() -> None:
    condition = make_condition(80, 0.0, 0.4)
    assert (condition.fast, condition.certificates, condition.accept_certificates) == (None, (), ())
    assert condition.best.threshold == "always"
