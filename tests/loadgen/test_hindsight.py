"""What choosing with hindsight would have had, of runs whose every request is known."""

import math

from loadgen.hindsight import hindsight_ms
from loadgen.record import Run
from tests.loadgen.runs import answer, refusal, run_of


def run_with(*latencies_ms: float, picture: int = 0, warm_up_s: float = 0.0) -> Run:
    return run_of([answer(n, ms, picture=picture) for n, ms in enumerate(latencies_ms)], warm_up_s=warm_up_s)


def test_of_each_request_the_quickest_answer_counts() -> None:
    one, two, three = run_with(10.0, 90.0, 30.0), run_with(50.0, 20.0, 80.0), run_with(70.0, 60.0, 40.0)
    assert hindsight_ms([one, two, three], 0.99) == 30.0
    assert hindsight_ms([one, two, three], 0.5) == 20.0
    assert hindsight_ms([two, three], 0.99) == 50.0


def test_requests_of_the_warm_up_do_not_count() -> None:
    assert hindsight_ms([run_with(900.0, 5.0, warm_up_s=1.0), run_with(800.0, 6.0, warm_up_s=1.0)], 0.99) == 5.0


def test_a_quick_refusal_is_no_answer() -> None:
    refused = run_of([refusal(0.0, 1.0)])
    assert hindsight_ms([refused, run_with(40.0)], 0.99) == 40.0
    assert hindsight_ms([refused, refused], 0.99) == math.inf


def test_there_is_no_choice_with_one_contender() -> None:
    assert hindsight_ms([run_with(10.0)], 0.99) is None


def test_contenders_that_were_sent_other_requests_are_not_put_together() -> None:
    assert hindsight_ms([run_with(10.0), run_with(10.0, picture=1)], 0.99) is None
    assert hindsight_ms([run_with(10.0), run_with(10.0, 20.0)], 0.99) is None
