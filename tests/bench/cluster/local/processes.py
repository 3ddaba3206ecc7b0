"""The processor time of a cluster's processes, by their part in a request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from tests.bench.cluster.local.tier import ClusterTier, title

Part: TypeAlias = Literal["proxy", "ingress", "replicas", "controller", "ray"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
_MARKS: Final[tuple[tuple[str, Part], ...]] = (
    ("haproxy -", "proxy"),
    ("ray::HAProxy", "proxy"),
    ("ray::Proxy", "proxy"),
    ("ray::ServeReplica:hawkvision:ingress", "ingress"),
    ("ray::ServeReplica:hawkvision:", "replicas"),
    ("ray::ServeController", "controller"),
)
"""What a process calls itself, or runs; what has none of these marks is Ray's own."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds that each process of a cluster has run, and its part."""

    seconds: Mapping[int, float]
    parts: Mapping[int, Part]

    def since(self, before: ProcessorTime) -> dict[Part, float]:
        """Seconds by part since an earlier moment."""
        spent = dict.fromkeys(PARTS, 0.0)
        for pid, seconds in self.seconds.items():
            spent[self.parts[pid]] += seconds - before.seconds.get(pid, 0.0)
        return spent


def processor_time(tier: ClusterTier) -> ProcessorTime:
    """Now, of all processes on all nodes."""
    pids = [pid for node in tier.nodes.numbers for pid in tier.nodes.net.processes(node)]
    return ProcessorTime(dict(_seconds(pids)), {pid: part_of(title(pid)) for pid in pids})


def part_of(command: str) -> Part:
    """The part of a process in a request, by what it calls itself."""
    return next((part for mark, part in _MARKS if mark in command), "ray")


def _seconds(pids: list[int]) -> Iterator[tuple[int, float]]:
    """User and system time (proc(5), fields 14 and 15 of stat)."""
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield pid, (int(fields[11]) + int(fields[12])) / _TICKS
