"""Audits are kept as evidence, and images only as long and as many as the operator says."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from edge.monitoring import evidence_log
from edge.monitoring.evidence_log import DAY_S, KEPT, Audit, EvidenceLog
from hawkvision.core.types import MinConfidence, Quality
from hawkvision.guarantee.review import BLOCK, STRATUM, for_label_check
from tests.edge.bench import AGREES, EDGE_CLASS, SURE, Bench, audits, bench, known, many, run
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.waiting import until

ALL = 1.0


async def audited(it: Bench, requests: int, **fields: Any) -> dict[int, Audit]:
    await known(it.node)
    await many(it, requests, **fields)
    await until(lambda: not it.node.auditor.pending)
    assert it.node.auditor.evidence is not None
    return await it.node.auditor.evidence.read(0)


def test_audits_are_kept_with_both_answers_and_outlive_the_node(large: Peer, tmp_path: Path) -> None:
    large.differing = 0.5
    large.top_k = AGREES

    def opened() -> EvidenceLog:
        return EvidenceLog(tmp_path / "audits", 0.2)

    async def scenario() -> None:
        async with bench(large, SURE, audit_share=0.2, evidence=opened) as it:
            rows = await audited(it, 200)
            assert list(rows) == list(range(1, len(rows) + 1))
            assert len(rows) == audits(it, "agree", "differ")
            for row in rows.values():
                assert row.settled
                assert row.share == 0.2
                assert len(row.stream) == 32
                assert row.answer == {"index": EDGE_CLASS}
                assert row.reference == {"index": ANSWER_CLASS if row.disagreement else EDGE_CLASS}
            assert sum(row.disagreement for row in rows.values()) == audits(it, "differ") > 0
        again = opened()
        assert await again.read(0) == rows
        assert again.last == len(rows)
        await again.close()

    run(scenario)
    assert stat.S_IMODE((tmp_path / "audits").stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["audits"], "no image is kept unless the operator says so"


def test_an_audit_that_is_missing_stays_a_row_that_counts_as_lost(large: Peer, tmp_path: Path) -> None:
    large.delay_s = 30.0

    async def scenario() -> None:
        async with bench(large, SURE, audit_share=0.2, evidence=lambda: EvidenceLog(tmp_path / "audits", 0.2)) as it:
            await known(it.node)
            await many(it, 100)
            due = it.node.auditor.pending
            evidence = it.node.auditor.evidence
            assert evidence is not None
            assert (await evidence.read(0), await evidence.count(0)) == ({}, 0), "those under way are not looked at"
        again = EvidenceLog(tmp_path / "audits", 0.2)
        rows = await again.read(0)
        assert len(rows) == await again.count(0) == due > 0
        assert {(row.reference, row.disagreement) for row in rows.values()} == {(None, 1.0)}
        await again.close()

    run(scenario)


@pytest.mark.parametrize("target", [MinConfidence(0.5), Quality.BALANCED])
def test_what_is_not_certified_is_audited_too_so_that_it_can_be(large: Peer, target: Any) -> None:
    large.top_k = AGREES

    async def scenario() -> int:
        async with bench(large, SURE, audit_share=0.2, evidence=lambda: EvidenceLog(None, 0.2)) as it:
            return len(await audited(it, 200, target=target))

    assert 20 <= run(scenario) <= 60


async def kept(log: EvidenceLog, images: list[bytes]) -> None:
    """An audit of each image, in which the stages differ."""
    for image in images:
        number = log.draw(0.0, b"", "1", image, 0.9, {"index": 1})
        assert number is not None
        log.settle(number, image, {"index": 2}, 1.0)
    await log.write()


def test_an_audit_that_was_drawn_on_suspicion_only_is_no_evidence() -> None:
    async def scenario() -> None:
        log = EvidenceLog(None, 0.02)
        assert log.draw(0.02, b"", "1", b"image", 0.9, {"index": 1}) is None
        assert log.draw(0.0199, b"", "1", b"image", 0.9, {"index": 1}) == 1
        await log.close()

    asyncio.run(scenario())


def test_images_are_for_this_user_only_and_bounded_in_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "audits.images"

    async def scenario() -> None:
        log = EvidenceLog(tmp_path / "audits", ALL, most_bytes=350, most_days=1.0)
        await kept(log, [bytes([each]) * 100 for each in range(5)])
        assert [log.has_image(number) for number in range(1, 6)] == [False, False, True, True, True]
        assert (log.image(2), log.image(5)) == (None, bytes([4]) * 100)
        await kept(log, [b"x" * 351])
        assert not log.has_image(6)
        assert log.has_image(5), "one image that is too large drives no others out"
        await log.close()
        log = EvidenceLog(tmp_path / "audits", ALL, most_bytes=200, most_days=1.0)
        assert [log.has_image(number) for number in range(1, 6)] == [False, False, False, True, True]
        assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await log.close()
        log = EvidenceLog(tmp_path / "audits", ALL)
        assert list(folder.iterdir()) == [], "who unsets the bounds has the images deleted"
        await log.close()

    asyncio.run(scenario())


def test_images_are_deleted_after_their_days(tmp_path: Path) -> None:
    now = [1_000.0]

    async def scenario() -> None:
        log = EvidenceLog(tmp_path / "audits", ALL, most_bytes=1_000, most_days=2.0, now=lambda: now[0])
        await kept(log, [b"old"])
        now[0] += DAY_S
        await kept(log, [b"new"])
        now[0] += 1.01 * DAY_S
        await log.write()
        assert (log.image(1), log.image(2)) == (None, b"new")
        now[0] += DAY_S
        await log.write()
        assert list((tmp_path / "audits.images").iterdir()) == []
        await log.close()

    asyncio.run(scenario())


def test_rows_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    async def scenario() -> int:
        log = EvidenceLog(tmp_path / "audits", ALL)
        with sqlite3.connect(tmp_path / "audits", isolation_level=None) as other:
            log._connection.execute("PRAGMA busy_timeout = 0")
            other.execute("BEGIN IMMEDIATE")
            await kept(log, [b"image"] * 3)
            assert other.execute("SELECT count(*) FROM audits").fetchone() == (0,)
            other.execute("ROLLBACK")
        found = len(await log.read(0))
        await log.close()
        return found

    assert asyncio.run(scenario()) == 3


def test_rows_are_bounded_and_leave_by_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_log, "KEPT", 2 * BLOCK)

    async def scenario() -> list[list[int]]:
        log, found = EvidenceLog(None, ALL), []
        for more in (2 * BLOCK, 1):
            await kept(log, [b"image"] * more)
            found.append([len(await log.read(block)) for block in range(3)])
        await log.close()
        return found

    assert asyncio.run(scenario()) == [[BLOCK, BLOCK, 0], [0, BLOCK, 1]]
    assert KEPT % BLOCK == 0


@pytest.mark.parametrize(
    ("share", "killed", "number"), [(ALL, False, 4), (0.5, False, BLOCK + 1), (ALL, True, BLOCK + 1)]
)
def test_another_share_or_a_sudden_end_begins_a_block(tmp_path: Path, share: float, killed: bool, number: int) -> None:
    async def scenario() -> int | None:
        (tmp_path / "run").mkdir()
        log = EvidenceLog(tmp_path / "run" / "audits", ALL)
        await kept(log, [b"image"] * 3)
        if killed:
            shutil.copytree(tmp_path / "run", tmp_path / "left")  # as a process that is killed now leaves it
        await log.close()
        log = EvidenceLog(tmp_path / ("left" if killed else "run") / "audits", share)
        drawn = log.draw(0.0, b"", "1", b"image", 0.9, {"index": 1})
        await log.close()
        return drawn

    assert asyncio.run(scenario()) == number


def test_the_images_for_the_check_of_labels_are_spread_over_each_block() -> None:
    for block in range(3):
        drawn = [number for number in range(block * BLOCK + 1, (block + 1) * BLOCK + 1) if for_label_check(number)]
        assert [(number - 1 - block * BLOCK) // STRATUM for number in drawn] == list(range(30))


def test_openings_are_remembered_in_their_order_with_what_they_certified(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EvidenceLog(tmp_path / "audits", ALL)
        for block in (4, 2, 4, 7):
            log.open(block)
        log.certified(2, [0.05, 0.01])
        assert log._connection.execute("PRAGMA synchronous").fetchone() == (2,), "a power cut forgets none"
        await log.close()
        log = EvidenceLog(tmp_path / "audits", ALL)
        assert list(log.openings().items()) == [(4, frozenset()), (2, frozenset({0.01, 0.05})), (7, frozenset())]
        await log.close()

    asyncio.run(scenario())
