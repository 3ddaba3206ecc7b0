"""Certificates from audits are wrong with probability δ at most, however often and in whatever order one looks."""

from __future__ import annotations

import math

import numpy as np

from hawkvision.guarantee.certificate import certified_steps
from hawkvision.guarantee.evidence import BEST_ONLY, Evidence, StageEvidence, Thresholds
from hawkvision.guarantee.review import BLOCK, how_tested, share_of_delta

DROP, DELTA, SEEDS, PLANNED = 0.03, 0.1, 400, 300
EVERYTHING = (BEST_ONLY, Thresholds(-math.inf))


def tempted(rng: np.random.Generator, blocks: int) -> bool:
    """Whether somebody who knows what labels will say, and labels what is harmless first, ever gets a certificate for
    stages that lose exactly the drop: 12 % differ, of which two in five lose and three in twenty gain.
    """
    for block in range(blocks):
        differs = rng.random(PLANNED) < 0.12
        kinds = rng.choice(3, PLANNED, p=(0.4, 0.15, 0.45))
        edge = np.where(differs & (kinds != 1), 1.0, 0.0)
        best = np.where(differs & (kinds != 0), 1.0, 0.0)
        harmless_first = np.argsort(edge - best, kind="stable")
        for arrived in (100, 200, PLANNED):
            for labelled in (0.0, 0.5, 1.0):
                hidden = np.full(PLANNED, np.nan)
                hidden[harmless_first[: round(labelled * PLANNED)]] = 0.0
                stage = StageEvidence(np.ones(PLANNED), edge + hidden, differs.astype(np.float64))
                seen = slice(0, arrived)
                planned, part = how_tested(arrived, binary=True, block=PLANNED)
                evidence = Evidence(
                    StageEvidence(stage.scores[seen], stage.losses[seen], stage.disagreements[seen]),
                    (best + hidden)[seen],
                    planned=planned,
                )
                if len(certified_steps(evidence, EVERYTHING, DROP, share_of_delta(part * DELTA, [False] * block))) > 1:
                    return True
    return False


def test_who_labels_until_chance_certifies_gets_no_more_than_delta() -> None:
    found = sum(tempted(np.random.default_rng(seed), 4) for seed in range(SEEDS))
    assert found / SEEDS <= DELTA + 3.0 * math.sqrt(DELTA * (1 - DELTA) / SEEDS)


def test_what_is_harmless_is_certified_before_the_block_is_full() -> None:
    differs = np.random.default_rng(1).random(PLANNED) < 0.12
    wrong = differs.astype(np.float64)
    stage = StageEvidence(np.ones(PLANNED), wrong, wrong)
    early = Evidence(StageEvidence(stage.scores[:250], wrong[:250], wrong[:250]), wrong[:250], planned=PLANNED)
    assert len(certified_steps(early, EVERYTHING, 0.08, share_of_delta(DELTA, []))) == 2


def test_a_whole_block_gets_the_exact_test_and_every_other_one_bets() -> None:
    assert how_tested(BLOCK, binary=True) == (None, 0.75)
    assert [how_tested(n, binary=True) for n in (1, BLOCK - 1)] == [(BLOCK, 0.25)] * 2
    assert [how_tested(n, binary=False) for n in (1, BLOCK)] == [(BLOCK, 1.0)] * 2


def test_the_part_of_delta_halves_with_each_block_since_the_last_that_certified() -> None:
    spent = [share_of_delta(1.0, earlier) for earlier in ([], [False], [False, False], [False, True], [True, False])]
    assert spent == [0.5, 0.25, 0.125, 0.5, 0.25]
    assert 0.0 <= share_of_delta(0.05, [False] * 2000) < 1e-300
