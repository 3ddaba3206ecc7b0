"""What people may say of an image, once and twice, and who is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge.monitoring.labelling import APART, GIVEN_S, ReviewItem, Showing
from hawkvision.core.errors import BadField, NotFound
from hawkvision.guarantee.review import BLOCK, labelled_twice
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind
from tests.edge.monitoring.desk import (
    VERSIONS,
    Desk,
    at_desk,
    by_clicks,
    number_of,
)

COUNTS = task_kind("counting", ["car"], {"groups": {"cars": ("car",)}, "max_error": 4.0})
SETS = task_kind("multi_label", ["cat", "dog"], {})


@pytest.mark.parametrize(
    ("kind", "answers", "label", "losses"),
    [
        (COUNTS, (3, 5), 4, (0.25, 0.25)),
        (COUNTS, (3, 5), {"cars": 5}, (0.5, 0.0)),
        (COUNTS, (3, 5), {"image": {"cars": 3}}, (0.0, 0.5)),
        (SETS, (["cat"], ["cat", "dog"]), ["cat", "dog"], (0.5, 0.0)),
        (SETS, (["cat"], ["cat", "dog"]), [], (1.0, 1.0)),
    ],
)
def test_counts_take_numbers_and_sets_of_labels_their_names(
    tmp_path: Path, kind: TaskKind[Any], answers: Any, label: Any, losses: tuple[float, float]
) -> None:
    def written(answer: Any) -> dict[str, Any]:
        if kind is COUNTS:
            return {"counts": {"image": {"cars": answer}}, "confidence": 0.9}
        labels = [{"index": kind.labels.index(each), "confidence": 0.9} for each in answer]
        return {"labels": labels, "confidence": 0.9}

    async def scenario(desk: Desk) -> None:
        number = desk.log.draw(0.0, b"", VERSIONS, b"image", 0.9, written(answers[0]))
        assert number == 1
        desk.log.settle(1, b"image", written(answers[1]), 0.5)
        (item,) = (await desk.page()).items
        assert item.choices == ("first", "second", "cannot_tell")
        assert sorted(str(each.label) for each in item.answers) == sorted(map(str, answers))
        await desk.reviewer.label(Showing(1).id, label)
        audit = await desk.log.audit(1)
        assert audit is not None
        assert audit.losses == losses
        for wrong in ("neither", "many", {"trucks": 1}, ["horse"], -1):
            with pytest.raises(BadField, match=f"image {Showing(1).id} takes first, second, cannot_tell, or: label:"):
                await desk.reviewer.label(Showing(1).id, wrong)

    at_desk(tmp_path, scenario, kind=kind)


async def up_to_a_second_look(desk: Desk, say: Callable[[int, Any], Any]) -> ReviewItem:
    """Label what waits until an image is listed for the second time."""
    while True:
        for item in (await desk.page(limit=40)).items:
            if Showing.read(item.id).again:
                return item
            await desk.reviewer.label(item.id, say(desk.truths[number_of(item) - 1], item))


def test_one_labelled_image_in_twenty_is_listed_again_after_others_as_an_item_of_its_own(tmp_path: Path) -> None:
    """The second look has an order of the answers of its own, too."""

    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        seen, shown = list[Showing](), dict[Showing, ReviewItem]()
        while items := (await desk.page(limit=40)).items:
            for item in items:
                seen.append(Showing.read(item.id))
                shown[seen[-1]] = item
                await desk.reviewer.label(item.id, by_clicks(desk.truths[seen[-1].number - 1], item))
        first, again = ([each.number for each in seen if each.again is later] for later in (False, True))
        chosen = set[int]()
        for number in first:
            audit = await desk.log.audit(number)
            if audit is not None and labelled_twice(audit.digest):
                chosen.add(number)
        assert 0.02 < len(chosen) / len(first) < 0.09
        places = {each: place for place, each in enumerate(seen)}
        assert set(again) <= chosen
        assert chosen - set(again) <= set(first[-APART:])
        assert all(places[Showing(each, again=True)] - places[Showing(each)] > APART for each in again)
        page = await desk.page()
        assert (page.repeated, page.contradictions) == (len(again), 0)
        pairs = [(shown[Showing(each)].answers, shown[Showing(each, again=True)].answers) for each in again]
        assert {one == other for one, other in pairs if len(one) == 2} == {True, False}

    at_desk(tmp_path, scenario)


@pytest.mark.parametrize("second", ["cannot_tell", "other"])
def test_labels_that_contradict_each_other_count_as_none_until_one_is_taken_back(tmp_path: Path, second: str) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(BLOCK)
        await desk.label_all(by_clicks, pages=1)
        item = await up_to_a_second_look(desk, by_clicks)
        number = number_of(item)
        same = by_clicks(desk.truths[number - 1], item)
        other = next(each for each in ("neither", "first", "wrong", "right") if each in item.choices and each != same)
        said = "cannot_tell" if second == "cannot_tell" else other
        before = await desk.page()
        assert (await desk.reviewer.label(item.id, said)).label == said
        with pytest.raises(BadField, match="takes that back first"):
            await desk.reviewer.label(item.id, same)
        page = await desk.page()
        assert (page.repeated, page.contradictions, page.labelled) == (before.repeated + 1, 1, before.labelled)
        audit = await desk.log.audit(number)
        assert audit is not None
        assert audit.told is None
        assert audit.losses is not None
        for was, now in zip(before.targets, page.targets, strict=True):
            assert now.to_best >= was.to_best
        await desk.reviewer.label(item.id, None)
        assert (await desk.page()).targets == before.targets
        await desk.reviewer.label(item.id, same)
        assert (await desk.page()).contradictions == 0
        await desk.reviewer.label(Showing(number).id, None)
        page = await desk.page()
        assert (page.repeated, page.labelled) == (before.repeated, before.labelled - 1)
        assert Showing(number).id in {each.id for each in page.items}

    at_desk(tmp_path, scenario)


def test_no_second_label_is_taken_of_an_image_that_gets_none(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        desk.audit(100)
        for item in (await desk.page()).items:
            with pytest.raises(NotFound, match="waits for a label"):
                await desk.reviewer.label(Showing(number_of(item), again=True).id, "cannot_tell")
        with pytest.raises(NotFound, match="waits for a label"):
            await desk.reviewer.label("1", "first")

    at_desk(tmp_path, scenario)


def test_work_is_divided_between_people_until_what_they_were_given_has_waited_too_long(tmp_path: Path) -> None:
    async def scenario(desk: Desk) -> None:
        async def given(who: str) -> tuple[list[str], int]:
            page = await desk.page(reviewer=who, limit=10)
            return [item.id for item in page.items], page.waiting

        desk.audit(BLOCK)
        (one, waiting), (other, also) = await given("a"), await given("b")
        assert waiting == also > 20
        assert not set(one) & set(other)
        assert (await given("a"))[0] == one, "one's own stays"
        assert (await given(""))[0] == one, "who gives no name sees all"
        await desk.reviewer.label(one[0], "cannot_tell")
        desk.clock.advance(GIVEN_S - 1.0)
        assert (await given("b"))[0] == other
        assert (await given("c"))[0] != one
        desk.clock.advance(2.0)
        found, waiting = await given("c")
        assert (found[0], waiting) == (one[1], also - 1)
        assert (await given("d"))[0][0] not in one

    at_desk(tmp_path, scenario)


def test_boxes_are_listed_to_look_at(tmp_path: Path) -> None:
    def written(number: int) -> dict[str, Any]:
        found = {"label": "car", "index": 0, "confidence": 0.9, "box": [0.1, 0.1, 0.2 + number / 10, 0.5]}
        return {"objects": [found] * number, "confidence": 0.9}

    async def scenario(desk: Desk) -> None:
        for number, differing in ((1, 0.0), (2, 0.5)):
            assert desk.log.draw(0.0, b"", VERSIONS, b"image", 0.9, written(1)) == number
            desk.log.settle(number, b"image", written(number), differing)
        page = await desk.page()
        (item,) = page.items
        assert (item.kind, item.choices, page.random_needed, page.waiting) == ("disagreement", (), 0, 1)
        assert {answer.text for answer in item.answers} == {"1 car", "2 car"}
        assert {len(answer.label["objects"]) for answer in item.answers} == {1, 2}
        assert item.image is not None
        with pytest.raises(BadField, match="cannot be labelled here"):
            await desk.reviewer.label(item.id, "first")

    at_desk(tmp_path, scenario, kind=task_kind("detection", ["car"], {}))
