"""A comparison from its first round to its report, which is written anew after every round.

Rounds take minutes, and servers of others fail in ways of their own. So whatever ends a comparison before its time, a
report of all rounds that were finished is there: on Ctrl-C it is shown as well.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
from rich.console import Console
from rich.markup import escape

from hawkvision.core.version import __version__
from hawkvision.system.files import write_atomic
from loadgen.commands.interrupt import INTERRUPTED_STATUS, heeded, unless
from loadgen.workload.record import Origin
from tests.bench.servers import results, tables
from tests.bench.servers.catalogue import Handler, ReferenceServer
from tests.bench.servers.handlers.work import Classify
from tests.bench.servers.measurement import KINDS, ComparedServers, MeasurementPlan, ServerMeasurement
from tests.bench.servers.results import (
    BARE,
    OURS,
    WITHOUT_KERNELS,
    AttributionFinding,
    ComparedLoop,
    Kind,
    ServerRow,
    ServersReport,
    ServingOverhead,
)

Part: TypeAlias = Literal["model", "overhead"]
VERSION_S: Final = 60.0
"""For an interpreter to start and look up a package, on a busy machine."""


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """All that is known beforehand."""

    origin: Origin
    cores: tuple[int, int]
    """The servers', the generator's."""
    model: str
    data: str
    labels: Sequence[int] | None
    field: ComparedServers
    plan: MeasurementPlan
    versions: Mapping[str, str]
    """By peer."""
    parts: Sequence[Part]
    json: Path | None
    html: Path | None

    def report(self, contest: ServerMeasurement, *, complete: bool) -> ServersReport:
        """Of the rounds that are finished."""
        whole = _whole(contest)
        rows = self._rows(whole)
        return ServersReport(
            origin=self.origin,
            cores=self.cores,
            load_after=os.getloadavg()[0],
            model=self.model,
            data=self.data,
            checked=len(self.field.bodies) if contest.rounds else 0,
            rounds=contest.rounds if "model" in self.parts else contest.overhead_rounds,
            window_s=self.plan.window_s,
            callers=self.plan.callers,
            rows=rows,
            against=results.against_best(rows),
            attribution=results.attribution(rows, whole),
            overhead=self._overhead(contest),
            failures=contest.failures,
            complete=complete,
        )

    def write(self, report: ServersReport) -> None:
        """Into the files that are asked for, each at once."""
        if self.json is not None:
            write_atomic(self.json, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if self.html is not None:
            write_atomic(self.html, tables.page(report).encode())

    def _rows(self, whole: Mapping[str, AttributionFinding]) -> tuple[ServerRow, ...]:
        loop = "decode, scale and ONNX Runtime in a loop; latencies computed: its turns, first come first served"
        peers = self.field.peers
        all_contenders = [
            *(ComparedLoop(BARE[each], BARE[each], "", loop, "bare", each) for each in handlers_of(peers)),
            *(
                ComparedLoop(peer.name, peer.title, self.versions[peer.name], peer.how, _kind(peer), peer.handler)
                for peer in peers
            ),
        ]
        return tuple(
            results.row(each, whole[each.name], whole.get(OURS), self.labels)
            for each in all_contenders
            if each.name in whole
        )

    def _overhead(self, contest: ServerMeasurement) -> tuple[ServingOverhead, ...]:
        """Likewise."""
        rounds = contest.overhead_rounds
        if not rounds:
            return ()
        whole = {key: waits[:rounds] for key, waits in contest.waits.items() if len(waits) >= rounds}
        ours = whole.get((OURS, "decode"))
        floor = results.overhead("", "client alone", None, whole["", None], ours)
        found = [
            results.overhead(peer.name, peer.title, kind, whole[peer.name, kind], ours)
            for kind in KINDS
            for peer in self.field.peers
            if (peer.name, kind) in whole
        ]
        return (floor, *found)


def _whole(contest: ServerMeasurement) -> dict[str, AttributionFinding]:
    """Those that went all finished rounds, for ratios are formed within rounds."""
    rounds, same_rate = contest.rounds, contest.same_rate_rounds
    return {
        name: AttributionFinding(visits[:rounds], at_rate[:same_rate] if len(at_rate) >= same_rate else ())
        for name, visits in contest.visits.items()
        if rounds and len(visits) >= rounds
        for at_rate in (contest.at_rate.get(name, []),)
    }


async def conduct(comparison: ServerComparison, bare: Mapping[Handler, Classify], console: Console) -> int:
    """Measure, show and write; 1 if a server had to be left out, 130 after an interrupt, else 0.

    An interrupt is heeded at the end of the loop that is under way; what was finished before it counts.
    """
    expected = {each: [classify(body) for body in comparison.field.bodies] for each, classify in bare.items()}
    field = replace(comparison.field, expected=expected)

    def keep() -> None:
        comparison.write(comparison.report(contest, complete=False))

    contest = ServerMeasurement(field, comparison.plan, telling(console), keep)
    with heeded() as stop:
        complete = await unless(stop, _measure(contest, bare, comparison.parts)) is not None
    report = comparison.report(contest, complete=complete)
    tables.show(report, console)
    comparison.write(report)
    if not complete:
        return INTERRUPTED_STATUS
    return 1 if contest.failures else 0


async def _measure(contest: ServerMeasurement, bare: Mapping[Handler, Classify], parts: Sequence[Part]) -> bool:
    if "model" in parts:
        await contest.run_model(bare)
        await contest.run_same_rate(bare)
    if "overhead" in parts:
        await contest.run_overhead()
    return True


def handlers_of(peers: Sequence[ReferenceServer]) -> tuple[Handler, ...]:
    """Those in use, for each has a bare loop."""
    return tuple(each for each in BARE if any(peer.handler == each for peer in peers))


def version_of(peer: ReferenceServer, python: Path) -> str:
    """Of the package that is compared, as its environment has it; it may not be known, and that ends nothing."""
    if peer.distribution is None:
        return f"({__version__})"
    ask = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    try:
        told = subprocess.run(
            [str(python), "-c", ask, peer.distribution], capture_output=True, text=True, check=True, timeout=VERSION_S
        )
    except (subprocess.SubprocessError, OSError):
        return f"({peer.distribution}, version not known)"
    return f"({peer.distribution} {told.stdout.strip()})"


def telling(console: Console) -> Callable[[str], None]:
    """Says how far things are."""
    return lambda text: console.print(escape(text), style="dim", highlight=False)


def _kind(peer: ReferenceServer) -> Kind:
    if peer.name in (OURS, WITHOUT_KERNELS):
        return "ours"
    return "python" if peer.python else "native"
