"""Items of review: their names, and what is given to whom."""

from __future__ import annotations

import pytest

from edge.monitoring.labelling import MOST_GIVEN, MOST_ITEMS, Labelled, ReviewQuery, Showing, Worklist, exchanged
from hawkvision.core.errors import NotFound
from tests.clocks import ManualClock


def test_a_name_says_neither_which_image_it_is_nor_that_it_came_before() -> None:
    showings = [Showing(number, again) for number in (0, 1, 2, 16_384, 10**12) for again in (False, True)]
    assert [Showing.read(each.id) for each in showings] == showings
    assert {len(each.id) for each in showings} == {16}
    parities = {int(Showing(number, again=True).id, 16) % 2 for number in range(20)}
    assert parities == {0, 1}


@pytest.mark.parametrize("name", ["", "1", "x" * 16, "0" * 17, "G000000000000000", "0" * 15 + "\n"])
def test_what_names_no_item_is_not_found(name: str) -> None:
    with pytest.raises(NotFound):
        Showing.read(name)


def test_both_showings_have_orders_that_do_not_depend_on_one_another() -> None:
    digests = [f"{number:02x}" for number in range(256)]
    orders = [(exchanged(digest, again=False), exchanged(digest, again=True)) for digest in digests]
    assert {orders.count((one, other)) for one in (False, True) for other in (False, True)} == {64}


def test_what_people_were_given_is_remembered_within_a_bound() -> None:
    images = [Labelled(number, "f" * 64, None, None, ()) for number in range(MOST_GIVEN + 3 * MOST_ITEMS)]
    worklist, seen = Worklist(ManualClock()), set[Showing]()
    for number in range(len(images) // MOST_ITEMS):
        page, waiting, _ = worklist.page(ReviewQuery(limit=MOST_ITEMS, reviewer=f"{number}"), images)
        assert waiting == len(images)
        seen |= set(page)
    assert len(seen) == MOST_GIVEN + MOST_ITEMS, "the first are forgotten, and so given again"
