"""Policies compared over links, in short: the options, and one real run of three namespaces with all processes."""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from loadgen.network.namespaces import available
from loadgen.workload.record import load
from tests.bench.policies.figures import PolicyRow, RoundResult, rows_of
from tests.bench.policies.plan import PolicyPlan, add_arguments, contenders, read_plan
from tests.images import encoded
from tests.loadgen.runs import answer, run_of

needs_a_link = pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")


def plan_of(*words: str) -> PolicyPlan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_plan(parser.parse_args(["--data", "some.npz", "--out", "some", *words]))


def test_all_policies_are_tested_by_default_and_ours_twice() -> None:
    names = [each.name for each in plan_of().contenders]
    assert names == [
        "hawkvision", "hawkvision-tcp", "infaas+fallback", "static+fallback", "static", "split+fallback",
        "all-dc+fallback", "all-edge",
    ]  # fmt: skip
    assert [each.transport for each in plan_of().contenders] == ["datagram", *["tcp"] * 7]


@pytest.mark.parametrize(
    ("word", "transports", "name", "arguments"),
    [
        ("static", "hawkvision=tcp", "static", "--policy static"),
        ("static@0.550+fallback", "hawkvision=tcp", "static@0.55+fallback",
         "--policy static --static-threshold 0.55 --deadline-fallback true"),
        ("split@small", "hawkvision=tcp", "split@small", "--policy split --variant small"),
        ("static", "static=datagram", "static", "--policy static --datagram-port 0 --datacenter-transport auto"),
        ("hawkvision", "hawkvision=uplink", "hawkvision", "--policy hawkvision --datacenter-transport auto"),
    ],
)  # fmt: skip
def test_a_policy_may_be_tested_with_settings_models_and_transports_of_its_own(
    word: str, transports: str, name: str, arguments: str
) -> None:
    found = contenders((word,), transports)
    assert (found[0].name, found[0].arguments) == (name, tuple(arguments.split()))
    assert [each.name for each in found[1:]] == ["hawkvision-tcp"] * (name == "hawkvision")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policies", "hawkvision,best"), "--policies: expected some of hawkvision, infaas"),
        (("--policies", "split,split"), "each once"),
        (("--policies", "hawkvision+fallback"), r"hawkvision has a way of its own; expected \+fallback after another"),
        (("--policies", "static@1.5"), "static@THRESHOLD with 0 to 1, .* got 'static@1.5'"),
        (("--policies", "split@No Name"), "POLICY@NAME of an edge model, got 'split@No Name'"),
        (("--transport", "split=pigeon"), "expected POLICY= and one of tcp, datagram, uplink, got 'split=pigeon'"),
        (("--warm-up-s", "60"), "--warm-up-s: expected 0 or more and less than the duration"),
        (("--rounds", "0"), "--rounds 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(*words)


@needs_a_link
@pytest.mark.slow
def test_policies_are_compared_over_a_link_until_interrupted(tmp_path: Path) -> None:
    """Client, edge and datacenter in three namespaces; Ctrl-C after a round of all leaves a report and no trace."""
    for label in range(3):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        (tmp_path / "data" / str(label) / "a.jpg").write_bytes(encoded(height=300, width=300, seed=label))
    words = (
        f"--data {tmp_path}/data --out {tmp_path}/out --backend noop --links wifi-busy --targets quality:best "
        "--policies hawkvision,all-edge,static@0.5+fallback --transport hawkvision=tcp --rate 20 --duration-s 1 "
        "--warm-up-s 0.2 --rounds 100 --deadline-ms 1000"
    ).split()
    command = [sys.executable, "-m", "tests.bench.policies", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as bench:
        assert bench.stdout is not None
        said = []
        for line in bench.stdout:
            said.append(line)
            if "round 2" in line:
                bench.send_signal(signal.SIGINT)
                break
        said += list(bench.stdout)
    assert bench.returncode == 130, "".join(said)
    report = msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes())
    names = ["hawkvision", "all-edge", "static@0.5+fallback"]
    rows = {row.name: row for row in msgspec.convert(report["rows"], list[PolicyRow])}
    assert sorted(rows) == sorted(names)
    assert [name for name in names if rows[name].ours_less is not None] == names[1:]
    ours, alone, _ = (load(tmp_path / "out" / "rounds" / f"wifi-busy-{name}-round1.json.gz") for name in names)
    assert [(each.due_s, each.image) for each in ours.outcomes] == [(each.due_s, each.image) for each in alone.outcomes]
    assert {each.tier for each in alone.outcomes if each.answered} == {"edge"}
    assert {each.tier for each in ours.outcomes if each.answered} >= {"datacenter"}
    assert report["failures"] == []
    assert rows["hawkvision"].uplink_bytes > 3 * rows["all-edge"].uplink_bytes
    assert ours.reference is not None
    assert set(ours.reference) == {0, 1, 2}
    assert [entry.name for entry in Path("/run/netns").iterdir() if f"-{bench.pid}-" in entry.name] == []


def result(name: str, ms: float, *, wrong: int = 0, requests: int = 200, uplink: int = 0) -> RoundResult:
    """Requests of one latency, some of each 200 wrong, evenly spread; the deadline is 100 ms."""
    outcomes = [answer(n / 20, ms + n % 3, right=n * wrong % 200 >= wrong, image=n) for n in range(requests)]
    return RoundResult(run_of(outcomes, name=name), uplink)


def row_of(name: str, **results: Sequence[RoundResult]) -> PolicyRow:
    (found,) = (row for row in rows_of("a link", 20.0, results) if row.name == name)
    return found


def test_right_answers_that_come_late_are_not_right_in_time() -> None:
    found = row_of("static", hawkvision=[result("hawkvision", 50.0, wrong=40)], static=[result("static", 500.0)])
    assert found.right_in_time == 0.0
    assert found.ours_less is not None
    assert found.ours_less.value == pytest.approx(0.8)
    assert 0.0 < found.ours_less.low < found.ours_less.high


def test_rounds_count_together_without_their_warm_ups_and_worst_and_best_stand_beside() -> None:
    found = row_of(
        "hawkvision", hawkvision=[result("hawkvision", 50.0, uplink=200), result("hawkvision", 60.0, wrong=40)]
    )
    warm_up = run_of([]).warm_up_s
    assert found.n == 2 * sum(n / 20 >= warm_up for n in range(200))
    assert found.worst == pytest.approx(0.8)
    assert found.best == 1.0
    assert found.right_in_time == pytest.approx(0.9)
    assert (found.p99_worst_ms, found.p99_best_ms) == (62.0, 52.0)
    assert found.uplink_bytes == 0.5
