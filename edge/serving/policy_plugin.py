"""What a baseline policy brings to a node: another way to handle requests, run in the same process for a comparison.

HawkVision ships none. A package provides one by an entry point of the group `hawkvision.policies`; its name is a value
of the setting `policy`, and the object that it names is called as `LoadBaseline` says. The servers, the queue, the
models, the escalation and the answers are the node's own, so that a comparison compares decisions alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from edge.inference.edge_stage import EdgeStage
from edge.inference.resident_models import ResidentStage
from edge.monitoring.certificate_reload import MakePolicy
from edge.serving.context import ServingContext
from edge.serving.request import RoutedImage
from edge.serving.request_handler import RequestHandler
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.package_settings import POLICY_ENTRY_POINTS
from hawkvision.models.manifest import InputSpec, Manifest


@dataclass(frozen=True, slots=True)
class BaselinePolicy:
    """A baseline's part of a running node."""

    name: str
    handler: Callable[[ServingContext, RoutedImage], RequestHandler]
    """Makes the handler of one request."""
    close: Callable[[], Awaitable[None]]


class LoadedBaseline(Protocol):
    """A baseline that knows its models."""

    @property
    def inputs(self) -> tuple[InputSpec, ...] | None:
        """Inputs of the models that may run on an image at the edge; None: those of the edge stage."""
        ...

    @property
    def make_policy(self) -> MakePolicy:
        """Makes its routes, in place of certified ones."""
        ...

    def open(self, policy: Policy, models: ResidentStage, metrics: EdgeMetrics) -> BaselinePolicy:
        """Its part of a node on the running event loop, with the edge stage's models."""
        ...


class LoadBaseline(Protocol):
    """What an entry point names."""

    def __call__(
        self, config: EdgeConfig, manifest: Manifest, cache: Path, stage: str, load: Callable[[str], EdgeStage]
    ) -> LoadedBaseline:
        """Load the baseline. Runs on a thread.

        Args:
            config: the node's settings.
            manifest: of the task.
            cache: folder of built models.
            stage: the edge stage.
            load: gives a variant or conditional ensemble of the manifest, ready for its first image.

        Raises:
            HawkVisionError: if something that it needs is missing.
        """
        ...


def find_baseline(name: str) -> LoadBaseline:
    """The baseline of this name.

    Raises:
        ConfigError: if no installed package provides it, or it cannot be imported.
    """
    for point in entry_points(group=POLICY_ENTRY_POINTS, name=name):
        try:
            found: LoadBaseline = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"edge.policy = {name!r}: entry point {point.value}: {error}") from None
        return found
    raise ConfigError(
        f"edge.policy = {name!r}: no installed package provides it; expected 'hawkvision', or the name of an entry "
        f"point of {POLICY_ENTRY_POINTS}"
    )
