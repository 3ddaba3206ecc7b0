"""Mixes of targets: what is read, and how it is dealt."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.servers.shared.request_fields import FIELDS
from hawkvision.core.errors import ConfigError
from loadgen.workload.record import TargetClass
from loadgen.workload.target_mix import deal, draws, parse


def test_targets_become_fields_with_the_deadline_of_all() -> None:
    drop, fast, rest = parse("max_drop:0.01=0.2, quality:fast=0.5,default=0.3", 100.0, "fail")
    assert drop.fields == {"max_accuracy_drop": "0.01", "deadline_ms": "100", "on_miss": "fail"}
    assert fast.fields["quality"] == "fast"
    assert rest.fields == {"deadline_ms": "100", "on_miss": "fail"}
    assert [drop.share, fast.share, rest.share] == pytest.approx([0.2, 0.5, 0.3])
    assert (drop.name, rest.name) == ("max_accuracy_drop=0.01", "default")


def test_shares_are_weights_and_one_when_not_given() -> None:
    assert [each.share for each in parse("quality:fast,quality:best=3")] == [0.25, 0.75]


@given(
    st.floats(0, 1).map(repr) | st.sampled_from(["0.0_1", "\u0660.\u0665", "1", "+.5", "0." + "3" * 60]),
    st.text(" \t", max_size=2),
)
def test_every_fraction_that_is_taken_is_one_that_nodes_read(value: str, blank: str) -> None:
    (target,) = parse(f"max_drop{blank}:{blank}{value}{blank}={blank}1")
    ((name, sent),) = target.fields.items()
    assert FIELDS[name].read("query", sent) == float(value)


def test_the_same_target_written_otherwise_is_the_same() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse("max_drop:0.1,max_accuracy_drop: 0.10")


@pytest.mark.parametrize(
    "text",
    ["", "quality=fast", "quality:great", "max_drop:2", "max_drop:x", "max_drop", "min_accuracy:nan", "default=x",
     "default=-1", "default=inf", "quality:fast=0", "quality:fast,quality:fast", "a:1"],
)  # fmt: skip
def test_what_is_no_mix_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--targets"):
        parse(text)


def test_impossible_deadlines_and_misses_are_refused() -> None:
    with pytest.raises(ConfigError, match="--deadline-ms"):
        parse("default", 0.0)
    with pytest.raises(ConfigError, match="--on-miss"):
        parse("default", None, "panic")


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 500), st.integers(0, 99))
def test_every_class_is_dealt_its_share(weights: list[float], n: int, seed: int) -> None:
    classes = [TargetClass({}, weight / sum(weights)) for weight in weights]
    dealt = deal(classes, n, seed)
    assert len(dealt) == n
    counts = np.bincount(dealt, minlength=len(classes))
    assert np.all(np.abs(counts - n * np.array([each.share for each in classes])) <= 1.0 + 1e-6)
    np.testing.assert_array_equal(dealt, deal(classes, n, seed))


def test_drawn_classes_follow_their_shares_and_the_seed_however_many_are_taken() -> None:
    classes = [TargetClass({"n": str(n)}, share) for n, share in enumerate((0.9, 0.099, 0.001))]
    drawn = list(itertools.islice(draws(classes, 5), 10_000))
    assert [drawn.count(number) / 10_000 for number in range(3)] == pytest.approx([0.9, 0.099, 0.001], abs=0.01)
    assert drawn.count(2) > 0
    assert list(itertools.islice(draws(classes, 5), 1500)) == drawn[:1500]
    assert list(itertools.islice(draws(classes, 6), 1500)) != drawn[:1500]
