"""Policies compared over links, in short: the options, and one real run of three namespaces with all processes."""

import argparse
import gzip
import signal
import subprocess
import sys
from html import escape
from pathlib import Path

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from loadgen.network.namespaces import available
from loadgen.network.profiles import load_profile
from loadgen.workload.record import load
from tests.bench.policies.compare_policies import rotated, samples
from tests.bench.policies.goal_checks import PolicyReport
from tests.bench.policies.plan import PolicyPlan, add_arguments, contenders, read_plan
from tests.images import encoded

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


def test_a_policy_may_be_tested_with_an_edge_that_stands_by() -> None:
    found = contenders(("static", "static+fallback", "static@0.550+fallback", "split@small+fallback"), "hawkvision=tcp")
    assert [each.name for each in found] == [
        "static",
        "static+fallback",
        "static@0.55+fallback",
        "split@small+fallback",
    ]
    assert found[0].arguments == ("--policy", "static")
    assert found[1].arguments == ("--policy", "static", "--deadline-fallback", "true")
    assert found[2].arguments == ("--policy", "static", "--static-threshold", "0.55", "--deadline-fallback", "true")
    assert found[3].variant == "small"


def test_a_transport_is_chosen_per_policy() -> None:
    found = contenders(("hawkvision", "static"), "hawkvision=tcp,static=datagram")
    assert [(each.name, each.transport) for each in found] == [("hawkvision", "tcp"), ("static", "datagram")]
    assert found[1].arguments == ("--policy", "static", "--datagram-port", "0", "--datacenter-transport", "auto")


def test_datagrams_may_be_left_to_the_edge_and_its_datacenter() -> None:
    ours, plain = contenders(("hawkvision",), "hawkvision=uplink")
    assert (plain.name, plain.transport) == ("hawkvision-tcp", "tcp")
    assert ours.arguments == ("--policy", "hawkvision", "--datacenter-transport", "auto"), "callers come over HTTP"


def test_a_policy_may_be_tested_with_several_settings() -> None:
    found = contenders(("static", "static@0.550", "static@0"), "static=datagram")
    assert [each.name for each in found] == ["static", "static@0.55", "static@0"]
    assert found[1].arguments[:4] == ("--policy", "static", "--static-threshold", "0.55")
    assert {each.transport for each in found} == {"datagram"}


def test_a_policy_may_be_tested_with_other_models_at_the_edge() -> None:
    found = contenders(("split", "split@efficientnet_lite1_int8", "hawkvision@small"), "hawkvision=datagram")
    assert [each.name for each in found] == ["split", "split@efficientnet_lite1_int8", "hawkvision@small"]
    assert found[1].arguments == ("--policy", "split", "--variant", "efficientnet_lite1_int8")
    assert found[2].arguments[:4] == ("--policy", "hawkvision", "--variant", "small")


def test_every_round_begins_with_another_policy() -> None:
    found = plan_of("--policies", "hawkvision,infaas", "--transport", "hawkvision=tcp").contenders
    firsts = [rotated(found, number)[0].name for number in range(3)]
    assert firsts == ["hawkvision", "infaas", "hawkvision"]
    assert {each.name for each in rotated(found, 1)} == {"hawkvision", "infaas"}


def test_each_place_gets_the_link_that_is_meant_for_it() -> None:
    tested = load_profile("outage")
    assert list(plan_of().profiles(tested).values()) == [tested, tested]
    assert list(plan_of("--where", "edge-dc").profiles(tested).values()) == [None, tested]
    assert list(plan_of("--client-link", "lan").profiles(tested).values()) == [load_profile("lan"), tested]


def test_a_phase_that_no_counted_request_meets_is_named() -> None:
    outage = load_profile("outage")
    words = ("--client-link", "lan", "--duration-s", "47", "--warm-up-s", "4")
    assert plan_of(*words, "--rounds", "1").unseen(outage) == ["nothing"]
    assert plan_of(*words, "--rounds", "2").unseen(outage) == []
    assert plan_of(*words, "--rounds", "1").unseen(load_profile("lan")) == []


def test_arrivals_of_a_kind_come_at_every_rate() -> None:
    assert plan_of().schedule(8.0) == "poisson:8"
    assert plan_of("--arrivals", "bursty,ratio=4,dwell_s=1").schedule(15.5) == "bursty:15.5,ratio=4,dwell_s=1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arrivals", "closed"), "--arrivals: expected some of poisson"),
        (("--arrivals", "poisson:8"), "--arrivals: expected some of poisson"),
        (("--arrivals", "bursty,size=4"), "--arrivals"),
        (("--policies", "hawkvision,best"), "--policies: expected some of hawkvision, infaas"),
        (("--policies", "split,split"), "each once"),
        (("--policies", "static@0.5,static@.50"), "each once"),
        (("--policies", "hawkvision+fallback"), r"hawkvision has a way of its own; expected \+fallback after another"),
        (("--policies", "static+fall"), "--policies: expected some of hawkvision, infaas"),
        (("--policies", "static@1.5"), "static@THRESHOLD with 0 to 1, .* got 'static@1.5'"),
        (("--policies", "split@No Name"), "POLICY@NAME of an edge model, got 'split@No Name'"),
        (("--policies", "static@"), "got 'static@'"),
        (("--policies", "infaas@0.5"), "expected a policy, static@THRESHOLD with 0 to 1, or POLICY@NAME"),
        (("--policies", ",".join(f"static@{n / 20}" for n in range(13))), "at most 12 contenders"),
        (("--transport", "split=pigeon"), "expected POLICY= and one of tcp, datagram, uplink, got 'split=pigeon'"),
        (("--where", "edge-moon"), "--where: expected some of client-edge, edge-dc"),
        (("--links", "lan,wlan"), "'wlan': expected one of lan"),
        (("--rate", "0"), "--rate: expected a number above 0"),
        (("--warm-up-s", "60"), "--warm-up-s: expected 0 or more and less than the duration"),
        (("--rounds", "0"), "--rounds 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(*words)


def test_a_record_says_of_each_link_what_it_was_given() -> None:
    profile = load_profile("lte-drive")
    found = samples({"client-edge": None, "edge-dc": profile}, 30.0, 2)
    assert {each.link for each in found} == {"edge-dc"}
    begun = [stretch.at_s - 0.1 for stretch in profile.schedule(5)[1:3]]
    assert [each.at_s for each in found[:3]] == pytest.approx([0.0, *begun])


@needs_a_link
@pytest.mark.slow
def test_policies_are_compared_over_a_link_until_interrupted(tmp_path: Path) -> None:
    """Client, edge and datacenter in three namespaces; Ctrl-C after a round of all leaves a report and no trace."""
    for label in range(3):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        (tmp_path / "data" / str(label) / "a.jpg").write_bytes(encoded(height=300, width=300, seed=label))
    words = (
        *(
            "--data",
            str(tmp_path / "data"),
            "--out",
            str(tmp_path / "out"),
            "--backend",
            "noop",
            "--links",
            "wifi-busy",
        ),
        *(
            "--policies",
            "hawkvision,all-edge,static@0.5+fallback",
            "--transport",
            "hawkvision=tcp",
            "--targets",
            "quality:best",
        ),
        *("--rate", "20", "--duration-s", "1", "--warm-up-s", "0.2", "--rounds", "100", "--deadline-ms", "1000"),
    )
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
    report = msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes(), type=PolicyReport)
    names = ["hawkvision", "all-edge", "static@0.5+fallback"]
    rows = {row.name: row for row in report.rows}
    assert sorted(rows) == sorted(names)
    assert [claim.against for claim in report.claims if claim.what.startswith("right")] == names[1:]
    ours, alone, _ = (load(tmp_path / "out" / f"wifi-busy-20-{name}.json.gz") for name in names)
    assert [(each.due_s, each.image) for each in ours.outcomes] == [(each.due_s, each.image) for each in alone.outcomes]
    assert {each.tier for each in alone.outcomes if each.answered} == {"edge"}
    assert {each.tier for each in ours.outcomes if each.answered} >= {"datacenter"}
    assert report.failures == []
    written = gzip.decompress((tmp_path / "out" / "wifi-busy-20-hawkvision.json.gz").read_bytes())
    assert msgspec.json.decode(written)["summary"]["name"] == "hawkvision"
    assert rows["hawkvision"].uplink_bytes > 3 * rows["all-edge"].uplink_bytes
    assert ours.links[0].link == "client-edge"
    assert ours.noise is not None
    assert 0.0 < ours.noise.p50_ms <= ours.noise.p99_ms
    assert ours.reference is not None
    assert set(ours.reference) == {0, 1, 2}
    page = (tmp_path / "out" / "wifi-busy-20.html").read_text(encoding="utf-8")
    assert "hawkvision: P99" in page
    assert all(escape(claim.goal) in page for claim in report.claims)
    assert "kB to the datacenter" in page
    assert [entry.name for entry in Path("/run/netns").iterdir() if f"-{bench.pid}-" in entry.name] == []
