"""People label audits, and a node's certificates are made of them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge.monitoring import evidence_log, review
from edge.monitoring.evidence_log import EvidenceLog
from edge.monitoring.labelling import Review, Showing
from edge.monitoring.review import DELTA, FEWEST, MOST_ASKED, AuditReview
from hawkvision.cascade.certification.profile import threshold_value
from hawkvision.cascade.certification.profile_files import dump, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import BadField, NotFound, Overloaded
from hawkvision.core.types import AccuracyStatus, MaxAccuracyDrop, Quality
from hawkvision.guarantee.labels import RANDOM_IMAGES
from hawkvision.guarantee.review import BLOCK, WHOLE_PART, share_of_delta
from hawkvision.tasks.registry import task_kind
from tests.clocks import ManualClock
from tests.edge.monitoring.desk import (
    PAIR,
    PROFILE,
    VERSIONS,
    Desk,
    at_desk,
    by_clicks,
    number_of,
    parts,
    to_best,
    truly,
)
from tests.hawkvision.cascade.synthetic import KIND


def test_labels_of_disagreements_certify_more_and_are_put_into_the_nodes_file(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        before = await desk.page()
        assert [item.kind for item in before.items[:RANDOM_IMAGES]] == ["random"] * RANDOM_IMAGES
        assert {item.kind for item in before.items[RANDOM_IMAGES:]} == {"disagreement"}
        assert (before.audits, before.block, before.doubt, before.next) == (BLOCK, 0, None, 100)
        unlabelled = await desk.reviewer.certify(None, labels_checked=False)
        assert (unlabelled.basis, unlabelled.labels) == ("agreement", 0)
        labelled = await desk.label_all(by_clicks)
        after = await desk.page()
        assert labelled == after.labelled >= before.disagreements
        made = await desk.reviewer.certify(None, labels_checked=False)
        assert (made.basis, made.labels, made.n) == ("labelled", labelled, BLOCK)
        assert {target.delta for target in made.targets} == set(parts(1))
        assert made.targets == after.targets
        assert set(made.accuracies) == {"small", "large"}
        assert all(to_best(made)[drop] <= share for drop, share in to_best(unlabelled).items())
        assert to_best(made)[0.05] < to_best(unlabelled)[0.05]

    at_desk(tmp_path, scenario)
    site = load_site(tmp_path / "certificates.json")
    assert (site.basis, site.data.n, site.data.stream) == ("review", BLOCK, "01")
    route = Policy(PROFILE, "small", "large", site=site).route(MaxAccuracyDrop(0.05))
    assert route.guarantee.status is AccuracyStatus.CERTIFIED
    assert route.threshold == threshold_value(
        next(each.threshold for each in reversed(site.pairs[0].conditions[0].certificates) if each.max_drop <= 0.0475)
    )


@pytest.mark.parametrize("other", ["", "2"], ids=["whole", "another version"])
def test_a_block_that_is_whole_and_of_one_version_certifies_more_than_one_that_is_not(
    tmp_path: Path, other: str
) -> None:
    async def scenario(desk: Desk) -> tuple[Review, Review]:
        desk.audit(1, versions=other or VERSIONS)
        desk.audit(BLOCK - 2)
        before = await desk.page()
        desk.audit(1)
        return before, await desk.page()

    before, after = at_desk(tmp_path, scenario)
    assert {target.delta for target in before.targets} == {share_of_delta((1.0 - WHOLE_PART) * DELTA, [])}
    if other:
        assert {target.delta for target in after.targets} == {share_of_delta((1.0 - WHOLE_PART) * DELTA, [])}
    else:
        assert {target.delta for target in after.targets} == set(parts(1))
        assert to_best(after)[0.05] < to_best(before)[0.05]


def test_certificates_say_whose_the_audits_are_if_they_are_of_one_stream_alone(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> list[str | None]:
        said = []
        for more, stream in ((FEWEST, b"\x02"), (1, b"\x01")):
            desk.audit(more, stream=stream)
            await desk.reviewer.certify(None, labels_checked=False)
            said.append(load_site(desk.file).data.stream)
        return said

    assert at_desk(tmp_path, scenario) == ["02", None]


def test_a_block_says_whether_it_is_too_early_to_end_the_alarm_that_stands(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> list[bool]:
        desk.audit(FEWEST)
        drawn = (await desk.page()).items[0].drawn.timestamp()
        found = []
        for desk.alarm in (-math.inf, drawn - 3600.0, drawn + 3600.0):
            found.append((await desk.page()).before_alarm)
        return found

    assert at_desk(tmp_path, scenario) == [False, False, True]


def test_certificates_are_of_all_times_of_their_audits_also_where_the_clock_went_back(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        for desk.log._now in (lambda: 1.9e9, lambda: 1.8e9, lambda: 1.85e9):
            desk.audit(FEWEST)
        await desk.reviewer.certify(None, labels_checked=False)

    at_desk(tmp_path, scenario)
    site = load_site(tmp_path / "certificates.json")
    assert site.since is not None
    assert (site.since.timestamp(), site.until.timestamp()) == (1.8e9, 1.9e9)


def test_nothing_is_said_of_an_audit_whose_block_nobody_has_opened(tmp_path: Path) -> None:
    """Whether it waits for a label would say that the stages differ, and the item what they answer."""

    async def scenario(desk: Desk) -> None:
        desk.audit(FEWEST)
        for label in (None, "first", "no such label"):
            for number in range(1, FEWEST + 1):
                with pytest.raises(NotFound, match="waits for a label"):
                    await desk.reviewer.label(Showing(number).id, label)
        assert desk.log.openings() == {}
        item = (await desk.page()).items[0]
        assert (await desk.reviewer.label(item.id, item.choices[0])).label == item.choices[0]

    at_desk(tmp_path, scenario)


def test_the_order_of_answers_does_not_say_whose_they_are(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> int:
        desk.audit(BLOCK)
        reference_first = 0
        for item in (await desk.page(offset=RANDOM_IMAGES)).items:
            audit = await desk.log.audit(number_of(item))
            assert audit is not None
            assert audit.reference is not None
            reference_first += item.answers[0].label == KIND.labels[audit.reference["index"]]
        return reference_first

    assert 30 < at_desk(tmp_path, scenario) < 70


def test_a_label_can_be_taken_back(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(200)
        before = await desk.page()
        item = before.items[-1]
        assert (await desk.reviewer.label(item.id, "cannot_tell")).label == "cannot_tell"
        with pytest.raises(BadField, match="has the label 'cannot_tell'; who is sure takes that back first"):
            await desk.reviewer.label(item.id, "first")
        await desk.reviewer.label(item.id, "cannot_tell")
        page = await desk.page(labelled=True)
        assert [(each.id, each.label) for each in page.items] == [(item.id, "cannot_tell")]
        assert page.targets == before.targets, "what nobody can tell counts as lost"
        assert (await desk.reviewer.label(item.id, None)).label is None
        assert {each.id for each in (await desk.page()).items} == {each.id for each in before.items}

    at_desk(tmp_path, scenario)


def test_labels_shifted_by_a_class_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        await desk.label_all(lambda truth, _: (truth + 1) % 10, pages=1)
        assert (await desk.page()).doubt is not None
        with pytest.raises(BadField, match=r"if the labels were not shifted by \+1"):
            await desk.reviewer.certify(None, labels_checked=True)
        assert not desk.file.exists()

    at_desk(tmp_path, scenario)


def test_clicks_that_call_every_answer_wrong_are_refused(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        await desk.label_all(lambda _, item: "wrong" if len(item.answers) == 1 else "neither", pages=1)
        with pytest.raises(BadField, match=r"large is right on 0\.0%, no oftener than by chance"):
            await desk.reviewer.certify(None, labels_checked=True)

    at_desk(tmp_path, scenario)


def test_labels_count_once_enough_of_those_drawn_at_random_are_known(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        item = (await desk.page()).items[0]
        await desk.reviewer.label(item.id, truly(desk.truths[number_of(item) - 1], item))
        with pytest.raises(BadField, match="expected at least 24"):
            await desk.reviewer.certify(None, labels_checked=False)

    at_desk(tmp_path, scenario)


def test_what_cannot_be_certified_is_refused_and_says_why(tmp_path: Path) -> None:
    async def few(desk: Desk) -> None:
        desk.audit(FEWEST - 1)
        with pytest.raises(BadField, match="49 audits certify nothing"):
            await desk.reviewer.certify(None, labels_checked=False)
        with pytest.raises(NotFound, match="there is none of number 1"):
            await desk.page(block=1)

    async def no_file(desk: Desk) -> None:
        desk.audit(BLOCK)
        with pytest.raises(BadField, match=r"set `edge\.certificates`"):
            await desk.reviewer.certify(None, labels_checked=False)

    async def forgets(desk: Desk) -> None:
        log = EvidenceLog(None, 0.02)
        reviewer = AuditReview("digits", KIND, log, lambda: (PROFILE, PAIR), lambda: VERSIONS, desk.file, ManualClock())
        with pytest.raises(BadField, match=r"set `edge\.state_file`"):
            await reviewer.certify(None, labels_checked=False)
        await log.close()

    for name, scenario, certificates in (("few", few, True), ("none", no_file, False), ("forgets", forgets, True)):
        (tmp_path / name).mkdir()
        at_desk(tmp_path / name, scenario, certificates=certificates)


@pytest.mark.parametrize("change", [{"basis": "site"}, {"edge": "medium"}, None])
def test_a_file_that_no_review_made_is_not_replaced(tmp_path: Path, change: dict[str, str] | None) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(200)
        for _ in range(2):  # its own are
            await desk.reviewer.certify(None, labels_checked=False)
        site = load_site(desk.file)
        if change is None:
            desk.file.write_bytes(b"{")
        elif "edge" in change:
            pairs = (*site.pairs, msgspec.structs.replace(site.pairs[0], edge=change["edge"]))
            desk.file.write_bytes(dump(msgspec.structs.replace(site, pairs=pairs)))
        else:
            desk.file.write_bytes(dump(msgspec.structs.replace(site, **change)))
        before = desk.file.read_bytes()
        with pytest.raises(BadField, match="replace"):
            await desk.reviewer.certify(None, labels_checked=False)
        assert desk.file.read_bytes() == before

    at_desk(tmp_path, scenario)


def test_few_may_wait_for_a_block_at_once(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(100)
        asked = [desk.page() for _ in range(MOST_ASKED)] + [desk.page(), desk.reviewer.certify(0, labels_checked=False)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(each, Overloaded) for each in found] == [False] * MOST_ASKED + [True, True]
        await desk.page()

    at_desk(tmp_path, scenario)


def test_certificates_are_of_the_stages_that_still_run(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(200)
        told = iter([VERSIONS, "2"])
        reviewer = AuditReview(
            "digits", KIND, desk.log, lambda: (PROFILE, PAIR), lambda: next(told), desk.file, ManualClock()
        )
        with pytest.raises(BadField, match="changed meanwhile"):
            await reviewer.certify(None, labels_checked=False)
        assert not desk.file.exists()
        assert desk.log.openings() == {0: frozenset()}

    at_desk(tmp_path, scenario)


def test_only_audits_of_the_stages_that_run_are_evidence_and_missing_ones_are_lost(tmp_path: Path) -> None:
    async def scenario(desk: Desk, missing: int) -> dict[float, float]:
        desk.audit(300, versions="0")
        desk.audit(400, missing=missing)
        page = await desk.page()
        assert page.audits == 400
        assert page.disagreements >= missing
        return to_best(page)

    (tmp_path / "other").mkdir()
    some = at_desk(tmp_path, lambda desk: scenario(desk, 80))
    none = at_desk(tmp_path / "other", lambda desk: scenario(desk, 0))
    assert all(some[drop] >= share for drop, share in none.items())
    assert some[0.3] > none[0.3]


@pytest.mark.parametrize("label", ["an unknown class", 10, -1, 1.5, True, ["0"], {"label": "0"}, "right"])
def test_a_label_that_is_none_is_refused_with_those_that_are(tmp_path: Path, label: Any) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(100)
        for number in range(1, 101):
            with pytest.raises(NotFound, match="no image"):  # whether there is one would say whether the stages differ
                await desk.reviewer.image(Showing(number).id)
        item = next(each for each in (await desk.page()).items if len(each.answers) == 2)
        with pytest.raises(BadField, match="takes first, second, neither, cannot_tell, or: label: expected"):
            await desk.reviewer.label(item.id, label)
        for number in (0, 101, 10**12):
            with pytest.raises(NotFound, match="waits for a label"):
                await desk.reviewer.label(Showing(number).id, "first")
        with pytest.raises(NotFound, match="no image"):
            await desk.reviewer.image(Showing(101).id)
        assert await desk.reviewer.image(item.id) == str(number_of(item) - 1).encode()

    at_desk(tmp_path, scenario)


def test_boxes_cannot_be_labelled_here(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        with pytest.raises(BadField, match="of kind 'detection', which cannot be labelled here"):
            await desk.reviewer.label(Showing(1).id, "first")

    at_desk(tmp_path, scenario, kind=task_kind("detection", ["car"], {}))


def of(review: Any, drop: float) -> float:
    found: dict[float, float] = {target.max_accuracy_drop: target.delta for target in review.targets}
    return found[drop]


def test_a_block_keeps_its_part_of_delta_and_the_next_one_has_half_of_it(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        made = []
        for block, times in ((0, 1), (1, 2), (2, 1)):
            desk.audit(BLOCK, missing=BLOCK // 10)
            made += [await desk.reviewer.certify(block, labels_checked=False) for _ in range(times)]
        assert [of(each, 0.01) for each in made] == parts(1, 2, 2, 3)
        assert [of(each, 0.5) for each in made] == parts(1, 1, 1, 1), "each block certified this"
        assert not {each.max_accuracy_drop: each.certified for each in made[0].targets}[0.01]
        written = {each.max_drop: each.delta for each in load_site(desk.file).pairs[0].conditions[0].certificates}
        assert (written[0.0095], written[0.475]) == tuple(parts(3, 1))
        desk.audit(10)
        assert (await desk.page()).block == 2, "the newest full one"
        assert (await desk.page(block=3)).audits == 10

    at_desk(tmp_path, scenario)


def test_who_looks_at_a_block_opens_it(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        seen = []
        for block, times in ((0, 1), (1, 2), (2, 1)):
            desk.audit(BLOCK)
            seen += [await desk.page(block=block) for _ in range(times)]
        for drop in (0.01, 0.5):
            assert [of(each, drop) for each in seen] == parts(1, 2, 2, 3)
        made = await desk.reviewer.certify(2, labels_checked=False)
        fast = load_site(desk.file).pairs[0].conditions[0].fast
        assert of(made, 0.5) == fast.delta == parts(3)[0]
        desk.audit(BLOCK)
        made = await desk.reviewer.certify(None, labels_checked=False)
        assert (made.block, load_site(desk.file).pairs[0].conditions[0].fast.delta) == (3, *parts(1))

    at_desk(tmp_path, scenario)


def test_blocks_older_than_an_opened_one_tell_nothing(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        item = (await desk.page()).items[-1]
        desk.audit(BLOCK)
        assert (await desk.page()).block == 0, "until certificates are made of it"
        await desk.reviewer.certify(0, labels_checked=False)
        assert (await desk.page()).block == 1
        before = desk.file.read_bytes()
        for refused in (
            desk.page(block=0),
            desk.reviewer.label(item.id, "first"),
            desk.reviewer.certify(0, labels_checked=False),
        ):
            with pytest.raises(BadField, match="block 0: block 1 was opened; older ones tell nothing any more"):
                await refused
        assert desk.file.read_bytes() == before

    at_desk(tmp_path, scenario)


def test_of_blocks_that_ended_only_the_newest_opens(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(3 * BLOCK)
        with pytest.raises(BadField, match="block 1: block 2 has ended since"):
            await desk.page(block=1)
        assert (await desk.page()).block == 2
        desk.audit(BLOCK + 10)
        assert [(await desk.page(block=block)).block for block in (2, 3, 4)] == [2, 3, 4], "open, ended, and filling"

    at_desk(tmp_path, scenario)


def test_an_open_block_that_was_cut_too_short_for_labels_is_left_for_a_later_one(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> list[int]:
        desk.audit(FEWEST)
        found = [(await desk.page()).block]
        await desk.log.close()
        desk.open(tmp_path, 0.03)
        desk.truths += [0] * (BLOCK - len(desk.truths))
        for audits in (FEWEST, BLOCK - FEWEST):
            desk.audit(audits)
            found.append((await desk.page()).block)
        return found

    assert at_desk(tmp_path, scenario) == [0, 0, 1]


def test_a_block_that_left_the_log_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (evidence_log, review):
        monkeypatch.setattr(module, "KEPT", 2 * BLOCK)

    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        await desk.page()
        desk.audit(BLOCK)
        desk.audit(60)
        assert (await desk.page()).block == 1, "not the one that is open"
        with pytest.raises(NotFound, match="there is none of number 0; expected 1 to 2"):
            await desk.page(block=0)

    at_desk(tmp_path, scenario)


def test_a_target_that_a_newer_block_does_not_support_is_no_longer_certified(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        def route(target: Any) -> tuple[bool, float]:
            found = Policy(PROFILE, "small", "large", site=load_site(desk.file)).route(target)
            return found.guarantee.status is AccuracyStatus.CERTIFIED, found.to_best

        written = list[int]()
        desk.reviewer.on_written = lambda: written.append(1)
        desk.audit(BLOCK)
        await desk.label_all(truly)
        await desk.reviewer.certify(None, labels_checked=False)
        assert route(MaxAccuracyDrop(0.05))[1] < 1.0
        assert route(Quality.FAST)[0]
        for _ in range(BLOCK - 1):  # certain answers of the edge stage, of which three in ten are wrong
            truth = len(desk.truths) % 10
            said, image = (truth + (len(desk.truths) % 10 < 3)) % 10, f"{len(desk.truths)}".encode()
            desk.truths.append(truth)
            number = desk.log.draw(0.0, b"", VERSIONS, image, 0.9999, {"index": said})
            assert number is not None
            desk.log.settle(number, image, {"index": truth}, float(said != truth))
        before = desk.file.read_bytes()
        await desk.page(block=1)
        await desk.label_all(truly)
        assert desk.file.read_bytes() == before, "it may still fill"
        desk.audit(1)
        await desk.page()
        assert route(MaxAccuracyDrop(0.05)) == (True, 1.0), "the reference stage answers"
        assert route(MaxAccuracyDrop(0.5))[1] < 1.0, "what the block supports stays"
        assert not route(Quality.FAST)[0]
        await desk.page()
        assert len(written) == 2

    at_desk(tmp_path, scenario)


@pytest.mark.parametrize("label", ["first", None])
def test_a_newer_block_without_checked_labels_takes_nothing_away(tmp_path: Path, label: str | None) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        await desk.reviewer.certify(None, labels_checked=False)
        before = desk.file.read_bytes()
        desk.audit(BLOCK, missing=BLOCK // 2)
        for item in (await desk.page()).items[RANDOM_IMAGES:] if label else ():
            await desk.reviewer.label(item.id, label)
        assert (await desk.page()).block == 1
        assert desk.file.read_bytes() == before

    at_desk(tmp_path, scenario)
