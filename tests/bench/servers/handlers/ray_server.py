"""Plain Ray Serve: one replica behind its HAProxy, an async method, no batching, nothing of HawkVision's datacenter.

Its Python proxy answers a third as much per CPU second (measured here on a busy machine: 50 against 155).
"""

from __future__ import annotations

import signal
from typing import Any, Final

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from tests.bench.servers.handlers import work

MAX_ONGOING: Final = 64
"""Requests given to the replica at once; Ray's default of 5 starves it under open-loop bursts."""


@serve.deployment(num_replicas=1, max_ongoing_requests=MAX_ONGOING)
class Classifier:
    """The one replica."""

    def __init__(self) -> None:
        self.classify = work.classifier()

    async def __call__(self, request: Request) -> Response:
        """The JPEG is the body."""
        index = self.classify(await request.body())
        return Response(b'{"index":%d}' % index, media_type="application/json")


def main() -> None:
    """Serve until told to stop."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": work.port(), "access_log": False}, proxy_location="HeadOnly")
    deployment: Any = Classifier
    serve.run(deployment.bind(), route_prefix="/classify")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
