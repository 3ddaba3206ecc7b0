"""The watch of a cluster's head notices that it is gone and that it is back, and readiness follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import NotReady
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.ingress.cluster_watch import HeadWatch
from hawkvision.datacenter.servers.service import TierService
from hawkvision.datacenter.stages.cascade_executor import Parts
from hawkvision.datacenter.stages.catalog import load_catalogs
from hawkvision.datacenter.stages.ensemble import EvaluationRequest


class Idle:
    """Access to replicas that nobody asks."""

    def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> Parts:
        raise AssertionError((evaluations, image, deadline, streaming))


async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_head_that_goes_and_returns_is_noticed_once_each() -> None:
    async def scenario() -> list[bool]:
        changes: asyncio.Queue[bool] = asyncio.Queue()
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        watch = HeadWatch(f"127.0.0.1:{port}", changes.put_nowait)
        watch.start()
        server.close()
        await server.wait_closed()
        seen = [await changes.get()]
        server = await asyncio.start_server(accept, "127.0.0.1", port)
        seen.append(await changes.get())
        await watch.close()
        server.close()
        return [*seen, *([changes.get_nowait()] if not changes.empty() else [])]

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == [False, True]


def test_tier_without_its_head_is_not_ready_and_says_so() -> None:
    tier = TierService(load_catalogs(DatacenterConfig(tasks=("cifar10",), backend="noop")), 4)
    tier.set_variants("cifar10", Idle())
    tier.readiness()
    tier.has_head = False
    with pytest.raises(NotReady, match="the head of the Ray cluster is gone"):
        tier.readiness()
    tier.has_head = True
    tier.readiness()
