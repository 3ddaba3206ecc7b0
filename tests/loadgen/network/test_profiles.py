"""Link profiles: what they claim is what the emulator does, chance is seeded, and malformed ones are refused by key."""

import math
from pathlib import Path

import pytest

from hawkvision.core.errors import ConfigError
from loadgen.network.link_model import Direction
from loadgen.network.link_spec import LinkSpec
from loadgen.network.profiles import LinkProfile, Way, load_profile, names

SOUND = """
description = "a test"
sources = ["assumption: everything"]
[up]
rate = "5mbit"
delay = "10ms"
[down]
rate = "5mbit"
[[phase]]
name = "good"
share = 0.75
mean_s = 4.0
[[phase]]
name = "bad"
share = 0.25
mean_s = 2.0
up = { loss = "4%", outage = "20ms" }
"""


def profile_of(text: str, folder: Path) -> LinkProfile:
    path = folder / "some.toml"
    path.write_text(text)
    return load_profile(path)


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("name", names())
def test_a_round_loses_what_the_profile_claims(name: str, way: Way) -> None:
    """Small packets at even times over one round, far below every rate, so that only the air loses any."""
    profile = load_profile(name)
    link = Direction(spec_of(profile, way), way)
    n = 100_000
    for number in range(n):
        link.offer(4, number * profile.length_s / n)
    _, claimed = profile.average(way)
    assert link.lost_queue == 0
    assert link.lost_air / n == pytest.approx(claimed, abs=4 * math.sqrt(max(claimed, 1e-9) / n) + 0.03 * claimed)


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("name", names())
def test_a_round_carries_what_the_profile_claims(name: str, way: Way) -> None:
    """Always a packet waiting: what is sent in a round is its mean rate, dead times included."""
    profile = load_profile(name)
    link = Direction(spec_of(profile, way), way)
    claimed, _ = profile.average(way)
    assert claimed is not None
    size = round(claimed * 1e6 * profile.length_s / 8 / 5_000)  # so that a round has about 5,000 packets
    sent, now = 0, 0.0
    while now < profile.length_s:
        link.offer(size, now)
        now = link._free_at
        sent += size
    # "lost" phases carry packets to their loss at the usual rate; the claim does not count those.
    lost_phase_bits = sum(
        phase.share * (phase.way(way).rate_bit_s or 0.0) for phase in profile.phases if phase.dead == "lost"
    )
    assert 8e-6 * sent / profile.length_s == pytest.approx(claimed + lost_phase_bits / 1e6, rel=0.01)


def spec_of(profile: LinkProfile, way: Way) -> LinkSpec:
    up, down = profile.specs()
    return up if way == "up" else down


def test_a_trace_repeats_by_its_number_and_differs_between_numbers() -> None:
    profile = load_profile("lte-drive")
    assert profile.specs(1) == load_profile("lte-drive").specs(1)
    assert profile.schedule(1) != profile.schedule(2)
    assert (
        profile.samples("edge-dc", 30.0, 1) == profile.samples("edge-dc", 60.0, 1)[: len(profile.samples("x", 30.0, 1))]
    )


@pytest.mark.parametrize("name", names())
def test_every_number_has_a_trace_though_a_stretch_may_be_too_short_for_its_bursts(name: str) -> None:
    profile = load_profile(name)

    for number in range(250):
        for spec in profile.specs(number):
            assert spec.trace is not None
            assert sum(step.seconds for step in spec.trace.steps) == pytest.approx(profile.length_s)


def test_both_ways_are_dead_at_the_same_time() -> None:
    profile = load_profile("outage")
    up, down = (Direction(spec, "way") for spec in profile.specs())
    dead = next(stretch for stretch in profile.schedule() if stretch.phase.name == "nothing")
    for link in (up, down):
        link.offer(100, 0.0)
        assert link.offer(100, dead.at_s + dead.seconds / 2) == ()
    alive = [sample.up for sample in profile.samples("edge-dc", profile.length_s) if sample.at_s == dead.at_s]
    assert alive == [False]


def test_what_is_held_arrives_when_the_link_is_back(tmp_path: Path) -> None:
    text = SOUND.replace('up = { loss = "4%", outage = "20ms" }', 'dead = "held"')
    profile = profile_of(text, tmp_path)
    held = next(stretch for stretch in profile.schedule() if stretch.phase.dead and stretch.at_s > 0)
    link = Direction(profile.specs()[0], "up")
    link.offer(100, 0.0)
    (arrival,) = link.offer(100, held.at_s + 0.1)
    assert arrival >= held.at_s + held.seconds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("share = 0.25", "share = 0.5"), "the shares add up to 1.25; expected 1"),
        (("share = 0.25", "share = 0"), r"\$\.phase\[1\]\.share"),
        (("mean_s = 2.0", "mean = 2.0"), "unknown field `mean`"),
        (('sources = ["assumption: everything"]', "sources = []"), r"\$\.sources"),
        (('rate = "5mbit"\ndelay', 'rate = "5"\ndelay'), "up: rate = '5'; expected a rate"),
        (('delay = "10ms"', 'delays = "10ms"'), "up: unknown key 'delays'"),
        (('loss = "4%"', 'loss = "400%"'), "phase 'bad': up: loss"),
        (('outage = "20ms"', 'burst = "4"'), "phase 'bad': up: unknown key 'burst'"),
        (('outage = "20ms"', 'jitter = "4ms"'), "phase 'bad': up: unknown key 'jitter'"),
        (("[up]", "[upwards]"), "unknown field `upwards`"),
        (("[up]", "[up"), "some.toml: "),
        (('name = "bad"', 'name = "bad"\ndead = "yes"'), r"Invalid enum value 'yes' - at `\$\.phase\[1\]\.dead`"),
    ],
)
def test_malformed_profiles_are_refused_by_the_key(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    assert SOUND.count(change[0]) == 1
    with pytest.raises(ConfigError, match=said):
        profile_of(SOUND.replace(*change), tmp_path)


def test_a_link_that_holds_everything_for_ever_is_refused(tmp_path: Path) -> None:
    text = SOUND.replace('name = "good"', 'name = "good"\ndead = "held"').replace(
        'name = "bad"', 'name = "bad"\ndead = "held"'
    )
    with pytest.raises(ConfigError, match="nothing would ever arrive"):
        profile_of(text, tmp_path)


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'wlan': expected one of lan, lte, lte-drive"):
        load_profile("wlan")
    with pytest.raises(ConfigError, match="no such link profile"):
        load_profile(tmp_path / "none.toml")
