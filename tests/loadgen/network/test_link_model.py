"""The emulated link keeps what it claims: rates of loss, bursts, outages, queues and delays, by seed; and its text."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from loadgen.network.link_model import MAX_IN_FLIGHT_BYTES, Direction, LinkPipe
from loadgen.network.link_spec import GilbertElliott, IidLoss, LinkSpec, LinkTrace, Outages, TraceStep

SIZE = 1250
"""Bytes: 1 ms at 10 Mbit/s."""


def arrivals(link: str | LinkSpec, count: int, every_s: float = 0.001, name: str = "") -> list[tuple[float, ...]]:
    direction = Direction(LinkSpec.parse(link) if isinstance(link, str) else link, name)
    return [direction.offer(SIZE, i * every_s) for i in range(count)]


def runs_of_loss(outcomes: Sequence[tuple[float, ...]]) -> list[int]:
    return [len(list(group)) for lost, group in itertools.groupby(outcomes, key=lambda times: not times) if lost]


def share_lost(outcomes: Sequence[tuple[float, ...]]) -> float:
    return sum(not times for times in outcomes) / len(outcomes)


# ── loss ──


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_independent_loss_is_within_binomial_bounds(ratio: float) -> None:
    outcomes = arrivals(LinkSpec(loss=IidLoss(ratio), seed=7), 20_000)
    assert abs(share_lost(outcomes) - ratio) <= 4 * math.sqrt(ratio * (1 - ratio) / 20_000)


@pytest.mark.parametrize(("ratio", "burst"), [(0.05, 4.0), (0.3, 4.0), (0.5, 2.0), (0.1, 20.0)])
def test_bursts_have_the_ratio_and_length_asked_for(ratio: float, burst: float) -> None:
    outcomes = arrivals(LinkSpec(loss=GilbertElliott(ratio, burst), seed=3), 200_000)
    runs = runs_of_loss(outcomes)
    assert share_lost(outcomes) == pytest.approx(ratio, rel=0.1)
    assert sum(runs) / len(runs) == pytest.approx(burst, rel=0.1)


def test_outages_have_the_share_and_length_asked_for() -> None:
    outcomes = arrivals("loss=10%,outage=10ms,seed=5", 500_000, every_s=0.0002)
    runs = runs_of_loss(outcomes)
    assert share_lost(outcomes) == pytest.approx(0.1, rel=0.1)
    assert 0.2 * sum(runs) / len(runs) == pytest.approx(10.0, rel=0.1)


def test_outage_passes_in_silence() -> None:
    # A chain that steps by packets would answer the same losses however rarely it is asked, and freeze TCP.
    outcomes = arrivals("loss=10%,outage=100ms,seed=2", 20_000, every_s=5.0)
    runs = runs_of_loss(outcomes)
    assert share_lost(outcomes) == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 20_000))
    assert sum(runs) / len(runs) == pytest.approx(1 / 0.9, rel=0.05)


def test_lost_packets_have_used_the_links_time() -> None:
    clean = arrivals("rate=10mbit,queue=10MB", 500, every_s=0.0)
    datagram = arrivals("rate=10mbit,queue=10MB,loss=30%", 500, every_s=0.0)
    assert 0 < share_lost(datagram) < 1
    assert all(there == here for there, here in zip(clean, datagram, strict=True) if here)


# ── rate, queue and time ──


def test_packets_leave_at_the_rate() -> None:
    outcomes = arrivals("rate=10mbit,delay=20ms,queue=1MB", 100, every_s=0.0)
    assert [times[0] for times in outcomes] == pytest.approx([0.020 + 0.001 * (i + 1) for i in range(100)])


def test_overload_fills_the_queue_and_loses_the_rest() -> None:
    direction = Direction(LinkSpec.parse("rate=10mbit,queue=50kB"))
    outcomes = [direction.offer(SIZE, i * 0.0005) for i in range(20_000)]  # twice the rate
    delays = [times[0] - i * 0.0005 for i, times in enumerate(outcomes) if times]
    assert len(delays) / 20_000 == pytest.approx(0.5, abs=0.01)
    assert max(delays) == pytest.approx(50_000 * 8 / 10e6, abs=0.001)
    assert direction.lost_queue == 20_000 - len(delays)


def test_jitter_stays_in_its_bounds_and_keeps_order() -> None:
    times = [times[0] for times in arrivals("delay=20ms,jitter=10ms", 5000)]
    delays = [at - i * 0.001 for i, at in enumerate(times)]
    assert times == sorted(times)
    assert min(delays) >= 0.020
    assert max(delays) <= 0.030 + 1e-9
    assert max(delays) - min(delays) > 0.009


def test_some_packets_are_overtaken() -> None:
    direction = Direction(LinkSpec.parse("delay=20ms,reorder=10%,reorder_delay=3500us"))
    delays = [direction.offer(SIZE, i * 0.001)[0] - i * 0.001 for i in range(20_000)]
    held = [delay for delay in delays if delay > 0.021]
    assert held == pytest.approx([0.0235] * direction.held_back)
    assert len(held) == pytest.approx(2000, abs=4 * math.sqrt(20_000 * 0.09))


def test_some_packets_arrive_twice() -> None:
    outcomes = arrivals("duplicate=5%", 20_000)
    assert sum(len(times) == 2 for times in outcomes) == pytest.approx(1000, abs=4 * math.sqrt(20_000 * 0.0475))
    assert all(len(set(times)) == 1 for times in outcomes)


# ── traces ──


def test_trace_begins_with_the_first_packet_and_loops() -> None:
    spec = LinkSpec(trace=LinkTrace((TraceStep(1.0, None, 10.0, 0.0), TraceStep(2.0, None, 40.0, 0.0))))
    direction = Direction(spec)
    delays = [direction.offer(SIZE, 100.0 + at)[0] - 100.0 - at for at in (0.0, 1.5, 2.5, 3.5, 4.5, 302.0)]
    assert delays == pytest.approx([0.010, 0.040, 0.040, 0.010, 0.040, 0.040])


def test_packets_queue_while_a_trace_sends_nothing() -> None:
    spec = LinkSpec(trace=LinkTrace((TraceStep(0.001, 10e6, 0.0, 0.0), TraceStep(0.999, 0.0, 0.0, 0.0))))
    outcomes = arrivals(spec, 3, every_s=0.0)
    assert [times[0] for times in outcomes] == pytest.approx([0.001, 1.001, 2.001])


def test_large_packet_crosses_many_rounds_of_a_short_trace() -> None:
    direction = Direction(LinkSpec(trace=LinkTrace((TraceStep(0.001, 1e3, 0.0, 0.0), TraceStep(0.001, 0.0, 0.0, 0.0)))))
    assert direction.offer(SIZE, 0.0)[0] == pytest.approx(2 * SIZE * 8 / 1e3, abs=0.003)


def test_trace_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tunnel.trace"
    path.write_text("# a tunnel\n2 20e6 20 0.01\n\n0.5 0 20 1   # inside\n10 - 5 0\n")
    steps = (TraceStep(2, 20e6, 20, 0.01), TraceStep(0.5, 0, 20, 1), TraceStep(10, None, 5, 0))
    assert LinkTrace.read(path, loop=False) == LinkTrace(steps, loop=False, source=str(path))


@pytest.mark.parametrize(
    "line", ["1 2 3", "1 2 3 4 5", "one 2000 3 0", "0 2000 3 0", "1 2 3 0", "1 - 3 1.5", "1 - nan 0"]
)
def test_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(f"1 - 0 0\n{line}\n")
    with pytest.raises(ConfigError, match=r"bad\.trace:2: "):
        LinkTrace.read(path)


@pytest.mark.parametrize(("text", "loop"), [("", True), ("1 0 5 0\n", True), ("1 - 0 0\n1 0 5 0\n", False)])
def test_trace_that_never_ends_a_wait_is_refused(tmp_path: Path, text: str, loop: bool) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.trace"):
        LinkTrace.read(path, loop)


# ── seeds and change ──

WILD = "rate=10mbit,delay=5ms,jitter=3ms,loss=10%,burst=3,reorder=5%,duplicate=5%,queue=20kB"


def test_same_seed_and_name_do_the_same() -> None:
    assert arrivals(f"{WILD},seed=9", 2000) == arrivals(f"{WILD},seed=9", 2000)


@pytest.mark.parametrize(("seed", "name"), [(9, "down"), (10, "up")])
def test_other_seed_or_name_does_otherwise(seed: int, name: str) -> None:
    assert arrivals(f"{WILD},seed=9", 2000, name="up") != arrivals(f"{WILD},seed={seed}", 2000, name=name)


def test_new_spec_takes_effect_at_once_and_keeps_queue_and_counts() -> None:
    direction = Direction(LinkSpec.parse("rate=10mbit"))
    assert direction.offer(SIZE, 0.0) == pytest.approx((0.001,))
    direction.spec = LinkSpec.parse("rate=20mbit,delay=1ms")
    assert direction.offer(SIZE, 0.0) == pytest.approx((0.001 + 0.0005 + 0.001,))
    assert direction.offered == 2


def specs() -> st.SearchStrategy[LinkSpec]:
    ratio = st.floats(0.0, 0.9)
    loss = st.one_of(
        st.none(),
        st.builds(IidLoss, st.floats(0.0, 1.0)),
        st.builds(GilbertElliott, ratio, st.floats(10.0, 1e3)),
        st.builds(Outages, ratio, st.floats(0.1, 1e4)),
    )
    return st.builds(
        LinkSpec,
        rate_bit_s=st.none() | st.floats(1e3, 1e10),
        delay_ms=st.floats(0.0, 1e3),
        jitter_ms=st.floats(0.0, 1e3),
        jitter_reorders=st.booleans(),
        loss=loss,
        reorder_ratio=st.floats(0.0, 1.0),
        reorder_delay_ms=st.floats(0.0, 100.0),
        duplicate_ratio=st.floats(0.0, 1.0),
        queue_bytes=st.integers(0, 10**6),
        seed=st.integers(0, 2**53),
    )


@given(specs(), st.lists(st.tuples(st.integers(1, 65_535), st.floats(0.0, 0.1)), max_size=40))
def test_whatever_the_link_packets_are_counted_and_obey_time(spec: LinkSpec, sent: list[tuple[int, float]]) -> None:
    direction, now, in_order = Direction(spec), 0.0, [0.0]
    copies = 0
    for size, pause_s in sent:
        now += pause_s
        for at in direction.offer(size, now):
            copies += 1
            assert at >= now + spec.delay_ms / 1e3 - 1e-9
            in_order.append(at)
    assert direction.offered == copies - direction.duplicated + direction.lost_air + direction.lost_queue
    if not spec.jitter_reorders and not spec.reorder_ratio:
        assert in_order == sorted(in_order)


# ── text ──


def test_spec_is_read_from_toml_values() -> None:
    values = {"rate": "1.5 Mbit", "delay": "1s", "loss": 0.05, "outage": "10ms", "jitter_reorders": True, "seed": 3}
    assert LinkSpec.from_mapping(values) == LinkSpec(
        rate_bit_s=1.5e6, delay_ms=1000.0, loss=Outages(0.05, 10.0), jitter_reorders=True, seed=3
    )


@given(specs())
def test_text_and_json_of_a_spec_read_back_as_it_was(spec: LinkSpec) -> None:
    assert LinkSpec.parse(str(spec)) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=LinkSpec) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed=3", "unknown key 'speed'; expected one of rate, delay"),
        ("delay", "expected key=value"),
        ("delay=", "expected key=value"),
        ("delay=1ms,delay=2ms", "delay is given twice"),
        ("delay=20", "number with us or ms or s"),
        ("rate=20MB", "number with bit or kbit"),
        ("rate=1bit", r"rate \(bit/s\) = 1; expected 1000 to"),
        ("delay=nanms", "delay"),
        ("loss=120%", "loss = 1.2; expected 0 to 1"),
        ("loss=5%,burst=4,outage=1ms", "contradict"),
        ("burst=4", "loss says how many and is missing"),
        ("loss=80%,burst=2", "burst = 2; expected 4 to"),
        ("loss=99.9%,burst=2000", "loss = 0.999; expected 0 to 0.99"),
        ("jitter_reorders=maybe", "expected no or yes"),
        ("seed=1.5", "seed = 1.5; expected a whole number"),
        ("seed=-1", "seed = -1; expected 0"),
        ("trace_end=loop", "there is none"),
        ("trace=/nowhere/at.all", "/nowhere/at.all: "),
    ],
)
def test_bad_spec_is_explained(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LinkSpec.parse(text)


# ── pipe ──


def test_pipe_gives_out_what_is_due_soonest_first() -> None:
    pipe: LinkPipe[str] = LinkPipe(LinkSpec.parse("delay=10ms"))
    pipe.put(SIZE, "first", 0.0)
    pipe.direction.spec = LinkSpec.parse("delay=30ms")
    pipe.put(SIZE, "second", 0.001)
    assert pipe.next_at == pytest.approx(0.010)
    assert [pipe.due(0.009), pipe.due(0.012), pipe.due(0.5)] == [[], ["first"], ["second"]]
    assert pipe.counts.late_max_ms == pytest.approx(500 - 31)


def test_cut_pipe_loses_what_is_under_way_and_what_comes() -> None:
    pipe: LinkPipe[str] = LinkPipe(LinkSpec.parse("delay=10ms"))
    pipe.put(SIZE, "under way", 0.0)
    pipe.dead = True
    pipe.put(SIZE, "offered", 0.001)
    pipe.dead = False
    pipe.put(SIZE, "after", 0.002)
    assert pipe.due(1.0) == ["after"]
    assert (pipe.counts.offered, pipe.counts.lost_cut, pipe.counts.delivered) == (3, 2, 1)


def test_pipe_holds_no_more_than_its_bound() -> None:
    pipe: LinkPipe[None] = LinkPipe(LinkSpec.parse("delay=60s"))
    for _ in range(2000):
        pipe.put(65_535, None, 0.0)
    held = len(pipe.due(100.0))
    assert 0 < held * 65_535 <= MAX_IN_FLIGHT_BYTES
    assert pipe.counts.lost_relay == 2000 - held
