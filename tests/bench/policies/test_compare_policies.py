"""Policies compared over links, in short: the options, and one real run of three namespaces with all processes."""

import argparse
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import AccuracyStatus
from loadgen.network.namespaces import available
from loadgen.workload.record import TargetClass, load
from tests.bench.policies.compare_policies import places
from tests.bench.policies.figures import PolicyRow, Round, rows_of
from tests.bench.policies.plan import CONTENDERS, PolicyPlan, add_arguments, read_plan
from tests.images import encoded
from tests.loadgen.runs import answer, run_of

needs_a_link = pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")


def plan_of(out: Path, *words: str) -> PolicyPlan:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_plan(parser.parse_args(["--data", "some", "--out", str(out), *words]))


def test_all_policies_have_the_same_stage_and_baselines_are_thresholds(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--edge", "small")
    given = {name: " ".join(plan.arguments(name, {0.0: math.inf, 0.01: 0.25})) for name in plan.contenders}
    assert given.keys() == CONTENDERS.keys()
    assert all(words.startswith("--task imagenet --variant small --backend auto --policy ") for words in given.values())
    assert {name: words.partition("--thresholds ")[2] for name, words in given.items() if "--thresholds" in words} == {
        "threshold": "0.0=inf,0.01=0.25", "all-dc": "0.0=inf", "all-edge": "0.0=-inf"
    }  # fmt: skip


def test_thresholds_are_tuned_for_the_drops_that_targets_allow(tmp_path: Path) -> None:
    assert plan_of(tmp_path, "--targets", "quality:best,max_drop:0.05,max_drop:0.01").drops == [0.0, 0.01, 0.05]


def test_a_round_is_made_over_all_links_before_the_next_and_begins_with_another_policy(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--links", "lan,lte", "--policies", "hawkvision,all-dc", "--rounds", "2")
    assert [each.path.name.partition(".")[0] for each in places(plan)] == [
        "lan-hawkvision-round1", "lan-all-dc-round1", "lte-hawkvision-round1", "lte-all-dc-round1",
        "lan-all-dc-round2", "lan-hawkvision-round2", "lte-all-dc-round2", "lte-hawkvision-round2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policies", "hawkvision,best"), "--policies: expected some of hawkvision, hawkvision-tcp"),
        (("--policies", "all-dc,all-dc"), "each once"),
        (("--warm-up-s", "60"), "--warm-up-s: expected 0 or more and less than the duration"),
        (("--rounds", "0"), "--rounds 0"),
        (("--minutes", "0"), "--minutes: expected a number above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(tmp_path, *words)


def test_a_folder_holds_rounds_of_the_same_conditions_alone(tmp_path: Path) -> None:
    plan_of(tmp_path, "--rate", "8", "--links", "lan")
    plan_of(tmp_path, "--rate", "8", "--links", "lte", "--rounds", "9")
    with pytest.raises(ConfigError, match=r"conditions\.json: rounds in this folder were made otherwise"):
        plan_of(tmp_path, "--rate", "9", "--links", "lan")


@needs_a_link
@pytest.mark.slow
def test_policies_are_compared_over_a_link_until_interrupted(tmp_path: Path) -> None:
    """Client, edge and datacenter in three namespaces. Ctrl-C after a round of all leaves a report and no trace, and
    the rounds that are done are read the next time.
    """
    for label in range(3):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        (tmp_path / "data" / str(label) / "a.jpg").write_bytes(encoded(height=300, width=300, seed=label))
    names = ["hawkvision", "all-edge"]
    words = (
        f"--data {tmp_path}/data --out {tmp_path}/out --backend noop --links wifi-busy --targets quality:best "
        f"--policies {','.join(names)} --rate 20 --duration-s 1 --warm-up-s 0.2 --deadline-ms 1000"
    ).split()
    command = [sys.executable, "-m", "tests.bench.policies", *words]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    with subprocess.Popen([*command, "--rounds", "100"], stdout=subprocess.PIPE, text=True, env=env) as bench:
        assert bench.stdout is not None
        said = []
        for line in bench.stdout:
            said.append(line)
            if "round 2" in line:
                bench.send_signal(signal.SIGINT)
                break
        said += list(bench.stdout)
    assert bench.returncode == 130, "".join(said)
    report = (tmp_path / "out" / "summary.json").read_bytes()
    rows = {row.name: row for row in msgspec.json.decode(report, type=Report).rows}
    assert sorted(rows) == sorted(names)
    assert [name for name in names if rows[name].ours_less is not None] == names[1:]
    ours, alone = (load(tmp_path / "out" / "rounds" / f"wifi-busy-{name}-round1.json.gz") for name in names)
    assert [(each.due_s, each.image) for each in ours.outcomes] == [(each.due_s, each.image) for each in alone.outcomes]
    assert {each.tier for each in alone.outcomes if each.answered} == {"edge"}
    assert {each.tier for each in ours.outcomes if each.answered} >= {"datacenter"}
    assert rows["hawkvision"].uplink_bytes > 3 * rows["all-edge"].uplink_bytes
    assert [entry.name for entry in Path("/run/netns").iterdir() if f"-{bench.pid}-" in entry.name] == []
    assert list((tmp_path / "state").rglob("edge-*")) == [], "no round knows what callers of another one did"
    again = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, check=True)
    assert "round 1: " not in again.stdout, "nothing is left to do"
    assert msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes(), type=Report).rows == [*rows.values()]


class Report(msgspec.Struct):
    rows: list[PolicyRow]


TARGETS = (TargetClass({"max_accuracy_drop": "0.05"}, 0.5), TargetClass({"quality": "best"}, 0.5))


def a_round(name: str, ms: float, *, wrong: int = 0, uplink: int = 0, certified: bool = False) -> Round:
    """200 requests of one latency; of the first target, some of each 100 are wrong. The deadline is 100 ms."""
    said = AccuracyStatus.CERTIFIED if certified else AccuracyStatus.BEST_EFFORT
    right = [n % 2 == 1 or n // 2 * wrong % 100 >= wrong for n in range(200)]
    outcomes = [answer(n / 20, ms + n % 3, right=right[n], image=n, target=n % 2, guarantee=said) for n in range(200)]
    made = run_of(outcomes, name=name, targets=TARGETS, reference=dict.fromkeys(range(200), True))
    return Round(**msgspec.structs.asdict(made), uplink_bytes=uplink)


def row_of(name: str, target: str, **rounds: Sequence[Round]) -> PolicyRow:
    (found,) = (row for row in rows_of("a link", rounds) if (row.name, row.summary.target) == (name, target))
    return found


DROP, BEST = (target.name for target in TARGETS)


def test_right_answers_that_come_late_are_not_right_in_time() -> None:
    both = {"hawkvision": [a_round("hawkvision", 50.0, wrong=40)], "all-dc": [a_round("all-dc", 500.0)]}
    found = row_of("all-dc", DROP, **both)
    assert found.right_in_time == (0.0, 0.0)
    assert found.ours_less is not None
    assert found.ours_less.value == pytest.approx(0.6)
    assert 0.0 < found.ours_less.low < found.ours_less.high
    best = row_of("all-dc", BEST, **both).ours_less
    assert best is not None
    assert best.value == 1.0, "each target by itself"


@pytest.mark.parametrize(
    ("wrong", "certified", "verdict"),
    [(0, True, "kept"), (40, True, "missed silently"), (40, False, "missed, never claimed")],
)
def test_a_target_is_kept_by_what_answers_lose_below_the_reference_stage(
    wrong: int, certified: bool, verdict: str
) -> None:
    kept = [a_round("hawkvision", 50.0, wrong=wrong, certified=certified)]
    found = row_of("hawkvision", DROP, hawkvision=kept).summary
    assert found.drop is not None
    assert found.drop.value == pytest.approx(wrong / 100)
    assert found.kept is not None
    assert found.kept.verdict == verdict
    assert found.unflagged == (100 if certified else 0)
    assert row_of("hawkvision", BEST, hawkvision=kept).summary.kept is None


def test_rounds_count_together_and_worst_and_best_stand_beside() -> None:
    two = [a_round("hawkvision", 50.0, uplink=200), a_round("hawkvision", 60.0, wrong=40)]
    found = row_of("hawkvision", DROP, hawkvision=two)
    figures = found.summary.figures
    assert (figures.n, found.rounds) == (200, 2)
    assert found.right_in_time == pytest.approx((0.6, 1.0))
    assert figures.effective is not None
    assert figures.effective.value == pytest.approx(0.8)
    assert found.p99_ms == (62.0, 52.0)
    assert found.uplink_bytes == 0.5
