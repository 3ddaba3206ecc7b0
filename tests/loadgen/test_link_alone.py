"""What a link alone takes of requests, from what a record says of it."""

import math

import pytest

from loadgen.link_alone import link_alone_ms
from loadgen.record import CLIENT_EDGE, EDGE_DC, LinkSample
from tests.loadgen.runs import answer, run_of


def sample(at_s: float, delay_ms: float, *, up: bool = True, link: str = CLIENT_EDGE) -> LinkSample:
    return LinkSample(at_s, link, 10.0, delay_ms, 0.0, up)


def alone_ms(due_s: float, *links: LinkSample) -> float | None:
    return link_alone_ms(run_of([answer(due_s, 5.0)], links=links), 0.99)


def test_a_link_takes_its_delay_there_and_back() -> None:
    assert alone_ms(1.0, sample(0.0, 3.0), sample(2.0, 40.0)) == pytest.approx(6.0)
    assert alone_ms(2.5, sample(0.0, 3.0), sample(2.0, 40.0)) == pytest.approx(80.0)


def test_who_asks_while_it_is_down_waits_until_it_is_up() -> None:
    held = (sample(0.0, 3.0), sample(1.0, 3.0, up=False), sample(1.2, 0.0, up=False), sample(1.25, 10.0))
    assert alone_ms(1.1, *held) == pytest.approx(150.0 + 20.0)


def test_answers_wait_as_pictures_do() -> None:
    held = (sample(0.0, 3.0), sample(1.0, 3.0, up=False), sample(1.25, 10.0))
    assert alone_ms(0.999, *held) == pytest.approx(251.0 + 10.0)


def test_over_a_link_that_stays_down_nothing_is_answered() -> None:
    assert alone_ms(1.1, sample(0.0, 3.0), sample(1.0, 3.0, up=False)) == math.inf


def test_percentiles_are_of_the_requests_that_count() -> None:
    run = run_of(
        [answer(0.1 * n, 5.0) for n in range(100)],
        links=(sample(0.0, 500.0), sample(0.95, 3.0), sample(9.0, 40.0)),
        warm_up_s=1.0,
    )
    assert link_alone_ms(run, 0.5) == pytest.approx(6.0)
    assert link_alone_ms(run, 0.99) == pytest.approx(80.0)


def test_without_a_link_at_the_caller_there_is_nothing_to_say() -> None:
    assert alone_ms(1.0) is None
    assert alone_ms(1.0, sample(0.0, 3.0, link=EDGE_DC)) is None
