"""INFaaS on a node: which variant is chosen, what is loaded for it, and what has to leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
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
from tests.edge.bench import SURE, Bench, bench, known, run
from tests.edge.conftest import Caller
from tests.edge.disk import Disk
from tests.edge.peer import Peer
from tests.images import encoded

SIZES = {"small": 5, "mid": 6, "big": 8}
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


def registered(disk: Disk) -> Registration:
    accuracies = {"small": 0.75, "mid": 0.85, "big": 0.88}
    variants = {
        name: Profiled(accuracy, infer_ms=float(SIZES[name]), load_ms=20.0, stage=disk.stage(name))
        for name, accuracy in accuracies.items()
    }
    return Registration(variants, "small", "large", {"medium": 0.91, "large": 0.95})


@asynccontextmanager
async def node(peer: Peer | None, disk: Disk, config: EdgeConfig = INFAAS) -> AsyncIterator[Bench]:
    baseline = InfaasBaseline(config, registered(disk), None)
    async with bench(peer, SURE, baseline=baseline, use=disk.use("small"), memory=disk.memory) as found:
        yield found


def on_node(
    peer: Peer | None, *asks: Mapping[str, Any], limit: int = 11
) -> tuple[list[Answer], list[str], dict[str, float]]:
    """The answers of one node, what it loaded after its start, and what it counted as loaded."""
    disk = Disk(limit, SIZES)

    async def scenario() -> tuple[list[Answer], dict[str, float]]:
        async with node(peer, disk) as it:
            disk.loads.clear()
            answers = [await it.ask(**fields) for fields in asks]
            return answers, {name: it.counted("model_load_duration_seconds_count", variant=name) for name in SIZES}

    answers, counted = run(scenario)
    return answers, disk.loads, counted


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
        async with node(large, Disk(11, SIZES), config) as it:
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
    with infaas_node() as caller:
        models = [caller.classify(encoded(), query).json["model"] for query in ("min_accuracy=0.5", "quality=best")]
        listed = caller.get("/v1/targets").json
        loads = caller.get("/metrics").body.decode()
    assert models[0] == "efficientnet_lite0_int8" != models[1]
    name = "hawkvision_model_load_duration_seconds_count"
    assert f'{name}{{task="imagenet",variant="{models[1]}"}} 1.0' in loads
    assert listed["policy"] == "infaas"


def test_a_node_with_a_variant_registers_that_alone() -> None:
    with infaas_node("--variant", "squeezenet1_1_int8") as caller:
        models = [caller.classify(encoded(), query).json["model"] for query in ("min_accuracy=0.5", "quality=best")]
    assert models == ["squeezenet1_1_int8"] * 2


def test_variants_leave_for_one_another(large: Peer) -> None:
    asks = [{"target": MinAccuracy(value)} for value in (0.7, 0.85, 0.88, 0.7)]
    answers, loads, _ = on_node(large, *asks, limit=8)
    assert [answer.model for answer in answers] == ["small", "mid", "big", "big"]
    assert loads == ["mid", "big"], "what is resident answers where it is accurate enough"
