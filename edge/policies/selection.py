"""From the setting `policy` to a node's routes and to who carries its requests out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edge.inference.edge_stage import Stage
from edge.policies import routes
from edge.policies.baseline import BaselinePolicy, FallbackCall, PatientCall
from edge.policies.infaas import InfaasCall, Worker
from edge.policies.registration import Registration
from edge.policies.routes import Rule
from hawkvision.cascade.policy import Policy
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig


def rule_of(config: EdgeConfig, registration: Registration | None) -> Callable[[Policy], Rule] | None:
    """How a baseline's routes are made; None for HawkVision, whose routes are certificates."""
    match config.policy:
        case "hawkvision":
            return None
        case "all-dc":
            return routes.all_dc
        case "all-edge":
            return routes.all_edge
        case "split":
            return routes.split
        case "static":
            return partial(routes.static, threshold=config.static_threshold)
        case "infaas":
            assert registration is not None, "its variants are registered before anything is routed"
            return registration.rule


def open_baseline(
    config: EdgeConfig, registration: Registration | None, policy: Policy, stage: Stage, metrics: EdgeMetrics
) -> BaselinePolicy | None:
    """A baseline's part of a node on this event loop, with the edge stage loaded; None for HawkVision."""
    if config.policy == "hawkvision":
        return None
    if registration is None:
        return BaselinePolicy(config.policy, FallbackCall if config.deadline_fallback else PatientCall)
    worker = Worker(config.task, registration, registration.accuracies(policy), stage, config.max_queue, metrics)
    return BaselinePolicy(config.policy, partial(InfaasCall, worker, config.deadline_fallback), worker.close)
