"""The baselines as an edge node loads them, by the entry points of `tests/bench/policies/installed`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from edge.inference.edge_stage import EdgeStage
from edge.inference.resident_models import ResidentStage
from edge.monitoring.certificate_reload import MakePolicy
from edge.serving.policy_plugin import BaselinePolicy, LoadedBaseline
from hawkvision.cascade.policy import Policy
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.imaging.preprocessing import least_side
from hawkvision.models.manifest import InputSpec, Manifest
from tests.bench.policies.baselines.handlers import BaselineHandler, nothing_to_close
from tests.bench.policies.baselines.infaas import InfaasHandler, Worker
from tests.bench.policies.baselines.registration import Registration, register
from tests.bench.policies.baselines.routes import BaselineRoutes, threshold
from tests.bench.policies.baselines.settings import BaselineSettings, read_thresholds

ROOT: Final = Path(__file__).resolve().parents[4]
"""The checkout."""
INSTALLED: Final = ROOT / "tests" / "bench" / "policies" / "installed"
"""A folder that holds the baselines' entry points as an installer would have written them."""


def with_baselines(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which a node finds the baselines."""
    found = [str(INSTALLED), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(found)}


@dataclass(frozen=True, slots=True)
class ThresholdBaseline:
    """The edge's answer from a threshold on, for each accuracy drop another."""

    config: EdgeConfig
    inputs: tuple[InputSpec, ...] | None = None

    @property
    def make_policy(self) -> MakePolicy:
        """See `LoadedBaseline`."""
        tuned = read_thresholds(self.config.feature(BaselineSettings).thresholds or "")
        return partial(BaselineRoutes, rule=partial(threshold, tuned=tuned))

    def open(self, policy: Policy, models: ResidentStage, metrics: EdgeMetrics) -> BaselinePolicy:
        """See `LoadedBaseline`."""
        return BaselinePolicy(self.config.policy, BaselineHandler, nothing_to_close)


@dataclass(frozen=True, slots=True)
class InfaasBaseline:
    """INFaaS, with its variants registered."""

    config: EdgeConfig
    registration: Registration
    inputs: tuple[InputSpec, ...] | None

    @property
    def make_policy(self) -> MakePolicy:
        """See `LoadedBaseline`."""
        return partial(BaselineRoutes, rule=self.registration.rule)

    def open(self, policy: Policy, models: ResidentStage, metrics: EdgeMetrics) -> BaselinePolicy:
        """See `LoadedBaseline`."""
        config, registration = self.config, self.registration
        worker = Worker(config.task, registration, registration.accuracies(policy), models, config.max_queue, metrics)
        return BaselinePolicy(config.policy, partial(InfaasHandler, worker), worker.close)


def load_baseline(
    config: EdgeConfig, manifest: Manifest, cache: Path, stage: str, load: Callable[[str], EdgeStage]
) -> LoadedBaseline:
    """The baseline that `config.policy` names; see `LoadBaseline`."""
    if config.policy != "infaas":
        return ThresholdBaseline(config)
    registration = register(config, manifest, cache, stage, load)
    largest = max((each.input for each in manifest.variants), key=least_side)
    return InfaasBaseline(config, registration, (largest,))
