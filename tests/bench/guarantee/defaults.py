"""The default request of every shipped task, as a node with a datacenter tier answers it.

    python -m tests.bench.guarantee defaults

It reads what a node reads at its start: the shipped manifests and profiles. Exit status 1 if the default request of a
task is not certified.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge.monitoring.certificate_reload import load_certification
from hawkvision.cascade.route import Route
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import AccuracyStatus, RequestFields
from hawkvision.models.manifest import load_manifest

SUMMARY: Final = "the default request of every shipped task: status, drop and share escalated"
MODELS: Final = Path(__file__).parents[3] / "models"
HEAD: Final = ("task", "edge stage", "status", "drop, at most", "escalated", "images", "δ")


@dataclass(frozen=True, slots=True)
class Default:
    """How a node routes the default request of a task."""

    task: str
    edge: str
    route: Route

    @property
    def certified(self) -> bool:
        """Whether a certificate lets the edge answer some images."""
        return self.route.guarantee.status is AccuracyStatus.CERTIFIED and self.route.escalation < 1.0

    @property
    def row(self) -> tuple[str, ...]:
        """The columns of `HEAD`."""
        known = self.route.guarantee
        drop, n, delta = "", "", ""
        if known.max_drop is not None and known.delta is not None:
            drop, n, delta = f"{100.0 * known.max_drop:g} %", f"{known.n:,}", f"{known.delta:.2g}"
        return (f"`{self.task}`", f"`{self.edge}`", known.status.value, drop, f"{self.route.escalation:.1%}", n, delta)


def shipped_tasks() -> list[str]:
    """Their names, sorted."""
    return sorted(path.parent.name for path in MODELS.glob("*/manifest.toml"))


def default_of(task: str) -> Default:
    """How a node with a datacenter tier routes a request of that task without a target."""
    config = EdgeConfig(task=task, models_dir=MODELS, datacenter_url="http://127.0.0.1:1")
    policy = load_certification(config, load_manifest(task, MODELS)).policy
    return Default(task, policy.pair.edge, policy.route(RequestFields().target))


def add_arguments(_: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_: argparse.Namespace) -> int:
    """Print the table in Markdown."""
    found = [default_of(task) for task in shipped_tasks()]
    for row in (HEAD, ("---",) * len(HEAD), *(each.row for each in found)):
        print(f"| {' | '.join(row)} |")
    return 0 if all(each.certified for each in found) else 1
