"""What the requests of a node share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge.monitoring.audits import Auditor
from edge.monitoring.served_versions import ServedVersions
from edge.serving.edge_execution import EdgeExecutor
from edge.serving.guarantees import Guarantees
from hawkvision.core.clock import Clock
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.tasks.kind import TaskKind

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The parts of a node that a request needs. Made and used on one event loop."""

    task: str
    kind: TaskKind[Any]
    """Of the task."""
    best: str
    """The reference stage, which is asked on escalation."""
    clock: Clock
    metrics: EdgeMetrics
    executor: EdgeExecutor
    """Runs the edge stage."""
    datacenter: DatacenterClient | None
    """The datacenter; None for a node that answers alone."""
    datacenter_timeout_s: float
    """Longest wait for the datacenter, with or without a deadline."""
    served: ServedVersions
    """What the datacenter runs."""
    guarantees: Guarantees
    """The certificates in force."""
    auditor: Auditor
