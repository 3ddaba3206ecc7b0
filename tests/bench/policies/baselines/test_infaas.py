"""INFaaS on a node: which variant is chosen, what is loaded for it, and what has to leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import AccuracyStatus, Answer, MaxAccuracyDrop, MinAccuracy, Quality, Reason, Tier
from hawkvision.system.child_server import running
from tests.bench.policies.baselines.infaas import Option, choose
from tests.bench.policies.baselines.plugin import InfaasBaseline, with_baselines
from tests.bench.policies.baselines.registration import Profiled, Registration
from tests.bench.policies.baselines.settings import BaselineSettings
from tests.bench.policies.baselines.store import SIZES, Store
from tests.edge.bench import SURE, bench, known, run
from tests.edge.conftest import Caller
from tests.edge.peer import Peer
from tests.images import encoded

INFAAS = EdgeConfig(policy="infaas", task="digits")


def infaas(**settings: Any) -> EdgeConfig:
    """A node's settings, with these of the baseline."""
    return replace(INFAAS, features=(BaselineSettings(**settings),))


CHEAP = Option("cheap", 0.6, 2.0)
MEDIUM = Option("medium", 0.8, 5.0)
MEDIUM_UNLOADED = Option("medium", 0.8, 5.0, 40.0, resident=False)
COMING = Option("coming", 0.82, 8.0, 30.0, resident=False)
LARGE = Option("large", 0.85, 20.0)
REMOTE = Option("remote", 0.9, 45.0, 30.0, local=False)

# ---------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("options", "required", "slack_ms", "chosen"),
    [
        ([CHEAP, MEDIUM, REMOTE], 0.5, 100.0, "cheap"),
        ([CHEAP, MEDIUM, REMOTE], 0.7, None, "medium"),
        ([CHEAP, MEDIUM, REMOTE], 0.88, 100.0, "remote"),
        ([CHEAP, MEDIUM_UNLOADED, REMOTE], 0.7, 100.0, "medium"),
        ([CHEAP, MEDIUM_UNLOADED, LARGE, REMOTE], 0.7, 100.0, "large"),
        ([CHEAP, MEDIUM_UNLOADED, LARGE, REMOTE], 0.7, 19.0, "large"),
        ([CHEAP, MEDIUM_UNLOADED, REMOTE], 0.7, 44.0, "medium"),
        ([COMING, MEDIUM_UNLOADED, REMOTE], 0.7, 100.0, "coming"),
        ([CHEAP, REMOTE], 0.7, 10.0, "remote"),
        ([CHEAP, MEDIUM], 0.99, 10.0, "medium"),
    ],
    ids=[
        "the cheapest that will do",
        "not one that is too inaccurate",
        "the datacenter where only that is accurate enough",
        "loaded here rather than sent away",
        "what is resident rather than loaded",
        "the soonest, if none is in time",
        "the soonest, even if it has to be loaded",
        "the one that is on its way already",
        "accuracy before latency",
        "the most accurate, if none is accurate enough",
    ],
)
def test_the_choice(options: list[Option], required: float, slack_ms: float | None, chosen: str) -> None:
    assert choose(options, required, slack_ms).name == chosen


# ------------------------------------------------------------------------------------------------------- answers


def registered(store: Store, limit: int = 11) -> Registration:
    accuracies = {"small": 0.75, "mid": 0.85, "big": 0.88}
    variants = {
        name: Profiled(accuracy, SIZES[name], infer_ms=float(SIZES[name]), load_ms=20.0)
        for name, accuracy in accuracies.items()
    }
    return Registration(variants, "small", "large", {"medium": 0.91, "large": 0.95}, limit, store.load)


def on_node(
    peer: Peer | None, *asks: Mapping[str, Any], limit: int = 11
) -> tuple[list[Answer], list[str], dict[str, float]]:
    """The answers of one node, what it loaded, and what it counted as loaded."""
    store = Store()

    async def scenario() -> tuple[list[Answer], dict[str, float]]:
        async with bench(peer, SURE, baseline=InfaasBaseline(INFAAS, registered(store, limit), None)) as it:
            answers = [await it.ask(**fields) for fields in asks]
            return answers, {name: it.counted("model_loads_total", variant=name) for name in SIZES}

    answers, counted = run(scenario)
    return answers, store.loads, counted


def test_variants_are_loaded_when_a_target_needs_them(large: Peer) -> None:
    asks = [{"target": MinAccuracy(value)} for value in (0.7, 0.85, 0.7, 0.85)]
    answers, loads, counted = on_node(large, *asks)
    assert [answer.model for answer in answers] == ["small", "mid", "small", "mid"]
    assert {(a.tier, a.degraded, a.reason, a.accuracy.status) for a in answers} == {
        (Tier.EDGE, False, None, AccuracyStatus.BEST_EFFORT)
    }
    assert (loads, counted["mid"]) == (["mid"], 1.0)


def test_a_target_beyond_all_local_variants_goes_to_the_datacenter(large: Peer) -> None:
    (answer, best), loads, _ = on_node(large, {"target": MaxAccuracyDrop(0.01)}, {"target": Quality.BEST})
    assert (answer.tier, answer.model, answer.reason) == (Tier.DATACENTER, "large", Reason.TARGET)
    assert (best.tier, best.degraded, best.accuracy.status) == (Tier.DATACENTER, False, AccuracyStatus.BEST_EFFORT)
    assert loads == []


def test_a_datacenter_that_fails_is_stood_in_for(large: Peer) -> None:
    large.status = 500
    (answer,), _, _ = on_node(large, {"target": Quality.BEST})
    assert (answer.tier, answer.model, answer.degraded, answer.reason) == (Tier.EDGE, "big", True, Reason.TARGET)


def test_the_nodes_best_choice_answers_just_before_the_deadline(large: Peer) -> None:
    large.delay_s = 20.0
    config = infaas()

    async def scenario() -> Answer:
        async with bench(large, SURE, baseline=InfaasBaseline(config, registered(Store()), None)) as it:
            await known(it.node)
            return await it.ask(target=Quality.BEST, deadline_ms=600.0)

    answer = run(scenario)
    assert (answer.tier, answer.model, answer.degraded) == (Tier.EDGE, "big", True)
    assert answer.timing_ms.total > 550.0


# ----------------------------------------------------------------------------------------------------- processes


@contextmanager
def infaas_node(*words: str) -> Iterator[Caller]:
    with running(
        "edge", "--port", "0", "--backend", "noop", "--policy", "infaas", *words, env=with_baselines()
    ) as node:
        caller = Caller(node)
        yield caller
        caller.close()


def test_a_node_loads_its_manifests_variants_under_its_memory() -> None:
    with infaas_node("--resident-memory-mb", "6") as caller:
        models = [caller.classify(encoded(), query).json["model"] for query in ("min_accuracy=0.5", "quality=best")]
        listed = caller.get("/v1/targets").json
        loads = caller.get("/metrics").body.decode()
    assert models == ["efficientnet_lite0_int8", "efficientnet_lite1_int8"], "only one of them fits at a time"
    assert 'hawkvision_model_loads_total{task="imagenet",variant="efficientnet_lite1_int8"} 1.0' in loads
    assert listed["policy"] == "infaas"


def test_a_node_with_a_variant_registers_that_alone() -> None:
    with infaas_node("--variant", "squeezenet1_1_int8") as caller:
        models = [caller.classify(encoded(), query).json["model"] for query in ("min_accuracy=0.5", "quality=best")]
    assert models == ["squeezenet1_1_int8"] * 2
