"""What a comparison found: per server its rates and waiting times over all rounds, and HawkVision's beside them.

Ratios are HawkVision's figure over the other's, formed within a round, so that a machine that is slower in one round is
so for both; the median over rounds is given with its range. Percentiles are of all rounds' requests together.

Each server's classes are counted against the labels, where there are any, and against HawkVision's, so that nobody can
be quicker by looking less closely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.workload.record import Origin
from tests.bench.servers.catalogue import DOCUMENTED, Handler, HandlerWork

T = TypeVar("T")
OURS: Final = "hawkvision"
WITHOUT_KERNELS: Final = "hawkvision-onnxruntime"
BARE: Final[Mapping[Handler, str]] = {"same": "bare loop", "documented": "bare loop, documented"}
Kind: TypeAlias = Literal["ours", "python", "native", "bare"]
"""HawkVision; servers whose HTTP server is Python; the others; loops without a server."""


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Closed loop for a while."""

    done: int
    failed: int
    wall_s: float
    cpu_s: float
    """Of the server, all its processes."""

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return self.done / self.wall_s


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Open loop for a while."""

    rate: float
    ms: NDArray[np.float64]
    """From when each request was due; infinite for those without a right answer."""


@dataclass(frozen=True, slots=True)
class ServerVisit:
    """One server in one round."""

    window: LoadWindow
    at: Mapping[float, WaitTimes] = field(default_factory=dict)
    """By share of that round's capacity."""
    answers: Sequence[int] = ()
    """The class it gave to each image, by image."""


class ServerRatio(msgspec.Struct, frozen=True):
    """HawkVision's over the other's: the median of rounds, and their range."""

    median: float
    low: float
    high: float


class AtShare(msgspec.Struct, frozen=True):
    """Open-loop Poisson arrivals at a share of the server's own capacity, or at a rate that all servers get."""

    share: float
    """Of its capacity."""
    rate: float
    """Median over rounds, requests per second."""
    n: int
    failed: int
    p50_ms: float
    p99_ms: float
    p50_ratio: ServerRatio | None
    p99_ratio: ServerRatio | None


class ServerRow(msgspec.Struct, frozen=True):
    """One server."""

    name: str
    title: str
    version: str
    how: str
    kind: Kind
    handler: Handler
    capacity: float
    """Answers per second in the closed loop, median over rounds."""
    capacity_low: float
    capacity_high: float
    capacity_ratio: ServerRatio | None
    per_cpu_s: float
    """Answers per CPU second, which others' work on the core changes least."""
    core_share: float
    """Of the one core, that its processes had."""
    failed: int
    loads: tuple[AtShare, ...]
    top1: float | None
    """Share of the images that it gave the label's class; None without labels."""
    agreement: float | None
    """Share of the images that it gave HawkVision's class; None without HawkVision."""
    at_rate: AtShare | None
    """At the rate that is one for all; None where that was not measured."""


class Against(msgspec.Struct, frozen=True):
    """HawkVision beside the Python peer that is best in one figure."""

    handler: Handler
    """The peers'."""
    figure: str
    peer: str
    ratio: ServerRatio


class Attribution(msgspec.Struct, frozen=True):
    """One factor of how many more answers per second HawkVision gives than a Python peer; within a round they multiply.

    The peer is the one that gives most as its documentation has it, or with our decoder where no other was asked for.
    """

    part: str
    """`kernels`, `serving`, `decoder`, or `all` of them."""
    what: str
    ratio: ServerRatio


class ServingOverhead(msgspec.Struct, frozen=True):
    """Serving without a model: one connection, one request at a time."""

    name: str
    title: str
    work: HandlerWork | None
    """None: the client's own floor."""
    n: int
    p50_ms: float
    p99_ms: float
    ratio: ServerRatio | None
    """Of medians; ours decodes, whatever the other does."""


class ServersReport(msgspec.Struct, frozen=True):
    """All of it, as `--json` writes it."""

    origin: Origin
    cores: tuple[int, int]
    """The servers', the generator's."""
    load_after: float
    """The machine's load average over a minute; the comparison itself makes about one and a half."""
    model: str
    data: str
    checked: int
    """Images on which every server gave its bare loop's class."""
    rounds: int
    """That were finished."""
    window_s: float
    callers: int
    rows: tuple[ServerRow, ...]
    against: tuple[Against, ...]
    attribution: tuple[Attribution, ...]
    """Where that comes from; empty where HawkVision, with ONNX Runtime as well, and a Python peer did not all run."""
    overhead: tuple[ServingOverhead, ...]
    failures: dict[str, str]
    """Why a server is missing, by name."""
    complete: bool = True
    """Whether all was measured that was asked for; else it goes on, or was ended before its time."""


@dataclass(frozen=True, slots=True)
class ComparedLoop:
    """Who a row is about."""

    name: str
    title: str
    version: str
    how: str
    kind: Kind
    handler: Handler


@dataclass(frozen=True, slots=True)
class AttributionFinding:
    """What was seen of one contender, a member of each sequence per round."""

    visits: Sequence[ServerVisit]
    at_rate: Sequence[WaitTimes] = ()


def row(
    contender: ComparedLoop, found: AttributionFinding, ours: AttributionFinding | None, labels: Sequence[int] | None
) -> ServerRow:
    """A contender's row.

    Args:
        contender: whose.
        found: what was seen of it.
        ours: what was seen of HawkVision in the same rounds; None where it took no part.
        labels: of the images; None if they have none.
    """
    visits = found.visits
    rates = [visit.window.per_s for visit in visits]
    capacity = float(np.median(rates))
    answers = visits[0].answers
    return ServerRow(
        name=contender.name,
        title=contender.title,
        version=contender.version,
        how=contender.how,
        kind=contender.kind,
        handler=contender.handler,
        capacity=capacity,
        capacity_low=min(rates),
        capacity_high=max(rates),
        capacity_ratio=ratio(visits, ours.visits if ours else None, lambda visit: visit.window.per_s),
        per_cpu_s=float(
            np.median([v.window.done / v.window.cpu_s for v in visits if v.window.cpu_s > 0.0] or [np.nan])
        ),
        core_share=float(np.median([visit.window.cpu_s / visit.window.wall_s for visit in visits])),
        failed=sum(visit.window.failed for visit in visits),
        loads=tuple(
            _at_share(
                share,
                [visit.at[share] for visit in visits],
                [visit.at[share] for visit in ours.visits] if ours else None,
            )
            for share in sorted(visits[0].at)
        ),
        top1=share_alike(answers, labels),
        agreement=share_alike(answers, ours.visits[0].answers if ours else None),
        at_rate=_at_share(
            found.at_rate[0].rate / capacity, found.at_rate, ours.at_rate if ours and ours.at_rate else None
        )
        if found.at_rate
        else None,
    )


def _at_share(share: float, waits: Sequence[WaitTimes], ours: Sequence[WaitTimes] | None) -> AtShare:
    pooled = np.concatenate([each.ms for each in waits])
    p50, p99 = percentiles(pooled)
    return AtShare(
        share=share,
        rate=float(np.median([each.rate for each in waits])),
        n=len(pooled),
        failed=int(np.isinf(pooled).sum()),
        p50_ms=p50,
        p99_ms=p99,
        p50_ratio=ratio(waits, ours, lambda each: percentiles(each.ms)[0]),
        p99_ratio=ratio(waits, ours, lambda each: percentiles(each.ms)[1]),
    )


def share_alike(answers: Sequence[int], others: Sequence[int] | None) -> float | None:
    """The share of images of one class in both; None where there is nothing to compare."""
    if not others or not answers:
        return None
    return float(np.mean(np.asarray(answers) == np.asarray(others)))


def against_best(rows: Sequence[ServerRow]) -> tuple[Against, ...]:
    """Answers per second and each P99, beside whichever Python peer is best in it; of each handler apart."""
    found: list[Against] = []
    for handler in BARE:
        peers = [row for row in rows if row.kind == "python" and row.handler == handler]
        if not peers:
            continue
        most = max(peers, key=lambda row: row.capacity)
        if most.capacity_ratio is not None:
            found.append(Against(handler, "answers/s", most.title, most.capacity_ratio))
        for number, load in enumerate(peers[0].loads):
            loads = [(row.loads[number], row.title) for row in peers]
            found += _quickest(handler, f"P99 at {load.share:.0%} of each one's capacity", loads)
        at_rate = [(row.at_rate, row.title) for row in peers if row.at_rate is not None]
        if at_rate:
            found += _quickest(handler, f"P99 at {at_rate[0][0].rate:.1f} requests/s for all", at_rate)
    return tuple(found)


def attribution(rows: Sequence[ServerRow], found: Mapping[str, AttributionFinding]) -> tuple[Attribution, ...]:
    """Ours over ours with ONNX Runtime, that over a peer with our decoder, and that over the peer as documented.

    Args:
        rows: of all that went all rounds.
        found: what was seen of each, by name.
    """
    peers = [row for row in rows if row.kind == "python"]
    documented = [row for row in peers if row.handler == "documented" and row.name.removesuffix(DOCUMENTED) in found]
    if OURS not in found or WITHOUT_KERNELS not in found or not peers:
        return ()
    last = max(documented or peers, key=lambda row: row.capacity)
    given = last.name.removesuffix(DOCUMENTED)
    title = next((row.title for row in rows if row.name == given), last.title)
    chain = [
        ("kernels", "ours, over ours with ONNX Runtime", OURS, WITHOUT_KERNELS),
        ("serving", f"that, over {title} with the same decoder", WITHOUT_KERNELS, given),
        ("decoder", f"that, over {last.title}", given, last.name),
        ("all", f"ours, over {last.title}", OURS, last.name),
    ]
    ratios = [
        (part, what, ratio(found[other].visits, found[one].visits, lambda visit: visit.window.per_s))
        for part, what, one, other in chain
        if one != other
    ]
    return tuple(Attribution(part, what, each) for part, what, each in ratios if each is not None)


def _quickest(handler: Handler, figure: str, loads: Sequence[tuple[AtShare, str]]) -> list[Against]:
    seen = [(load, title) for load, title in loads if load.p99_ratio is not None and not math.isnan(load.p99_ms)]
    if not seen:
        return []
    load, title = min(seen, key=lambda each: each[0].p99_ms)
    assert load.p99_ratio is not None
    return [Against(handler, figure, title, load.p99_ratio)]


def overhead(
    name: str,
    title: str,
    work: HandlerWork | None,
    rounds: Sequence[NDArray[np.float64]],
    ours: Sequence[NDArray[np.float64]] | None,
) -> ServingOverhead:
    """A row of waiting times (ms, an array per round) without a model."""
    p50, p99 = percentiles(np.concatenate(rounds))
    compared = ratio(rounds, ours, lambda waits: percentiles(waits)[0])
    return ServingOverhead(name, title, work, sum(map(len, rounds)), p50, p99, compared)


def ratio(theirs: Sequence[T], ours: Sequence[T] | None, figure: Callable[[T], float]) -> ServerRatio | None:
    """Round by round; None without anything to compare with."""
    if ours is None:
        return None
    found = [figure(us) / figure(them) for us, them in zip(ours, theirs, strict=True)]
    return ServerRatio(float(np.median(found)), min(found), max(found))


def percentiles(ms: NDArray[np.float64]) -> tuple[float, float]:
    """P50 and P99: waits that were seen, or infinite where requests without answers reach so far. NaN of nothing."""
    if len(ms) == 0:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(ms, (50, 99), method="higher")
    return float(p50), float(p99)
