"""How requests choose among a deployment's replicas: Serve uses these routers in its proxies and in the ingress.

Serve pickles this module by value where a tier is deployed. What depends on the version of the process that routes, it
calls in other modules.
"""

from __future__ import annotations

import asyncio
from typing import Final

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RunningReplica

from hawkvision.datacenter.deployment.messages import own_metadata

_LOOK_S: Final = 0.1
"""From one look at the replicas of a waiting request to the next."""


class MatchingRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Chooses among the replicas of this process's protocol, while nodes of a cluster run several versions.

    If there is none it chooses among all: they refuse the request and say why.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`."""
        # Releases of Ray before 2.60 have no metadata of replicas.
        matching = [r for r in replicas if getattr(r, "replica_metadata", own_metadata()) == own_metadata()]
        super().update_replicas(matching or replicas)


class RefusingRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Refuses requests while there is no replica, and those that wait; Serve's own lets them wait for the next."""

    async def _choose_replica_for_request(self, request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        choosing = asyncio.ensure_future(super()._choose_replica_for_request(request, is_retry=is_retry))
        try:
            while not choosing.done():
                if not self.curr_replicas:
                    raise DeploymentUnavailableError(self._deployment_id)
                await asyncio.wait((choosing,), timeout=_LOOK_S)
            return choosing.result()
        finally:
            choosing.cancel()


MATCHING: Final = RequestRouterConfig(request_router_class=MatchingRouter)
REFUSING: Final = RequestRouterConfig(request_router_class=RefusingRouter)
