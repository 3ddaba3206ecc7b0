"""A node whose edge stage looks again: what callers and metrics are told, and what there is no time for."""

from __future__ import annotations

import pytest

from edge.factory import load_components
from edge.inference.edge_stage import ConditionalEnsemble, LoadedModel
from hawkvision.core.errors import ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import OnMiss, Quality
from tests.edge.bench import SPEC, SURE, UNSURE, GatedBackend, bench, run


def others(seconds: float = 0.0) -> ConditionalEnsemble:
    found = ConditionalEnsemble((LoadedModel("second", GatedBackend(SURE), SPEC),), (1.0, 1.0), 1.0, 0.99)
    if seconds:
        found.duration.record(seconds)
    return found


def test_ensemble_runs_are_counted() -> None:
    async def scenario() -> None:
        async with bench(None, lead=UNSURE, others=others()) as there:
            await there.ask()
            assert there.counted("ensemble_runs_total") == 1.0

    run(scenario)


@pytest.mark.parametrize("target", [Quality.FAST, Quality.BALANCED])
def test_an_answer_in_haste_is_in_time_and_says_that_it_is_below_target_whatever_that_is(target: Quality) -> None:
    async def scenario() -> None:
        async with bench(None, lead=UNSURE, others=others(seconds=60.0)) as there:
            answer = await there.ask(target=target, deadline_ms=5_000.0)
            assert (answer.degraded, answer.deadline_met) == (True, True)
            assert answer.accuracy.max_drop is None
            assert there.counted("ensemble_runs_total") == 0.0
            assert there.counted("degraded_total") == 1.0

    run(scenario)


def test_who_would_rather_wait_gets_the_second_look() -> None:
    async def scenario() -> None:
        async with bench(None, lead=UNSURE, others=others(seconds=60.0)) as there:
            await there.ask(target=Quality.FAST, deadline_ms=5_000.0, on_miss=OnMiss.WAIT)
            assert there.counted("ensemble_runs_total") == 1.0

    run(scenario)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            EdgeConfig(variant="edge_ensemble", backend="fpga-ref"),
            "expected one of efficientnet_lite0_int8, efficient",
        ),
        (EdgeConfig(variant="reference"), "ensembles with accept_confidence, and this ensemble has none"),
    ],
)
def test_who_runs_single_models_only_refuses_an_ensemble_and_names_its_members(config: EdgeConfig, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        load_components(config)
