"""`python -m tests.bench.transport.escalation_grpc`: the escalation into the datacenter tier, kept-alive HTTP against
Serve's gRPC proxy.

Starts, on this machine and in one run, (a) the tier as `python -m hawkvision.datacenter` runs it, with its own HTTP
server, and (b) the same server and the same variant behind Ray Serve's gRPC proxy, under the same tuning. Both get the
same 30 KB JPEG from this process, closed loop, one caller and sixteen, over kept-alive connections (HTTP one for each
caller, gRPC one channel); the order rotates each round, so that the machine's drift affects both alike. It prints the
caller's wait.

The gRPC service has one method, `infer(BytesValue) returns (BytesValue)`: the image one way, the reply's JSON the
other. Protobuf's well-known type needs no compiler and costs one copy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import cv2
import grpc
import grpc.aio
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue
from starlette.requests import Request
from starlette.types import Message

from hawkvision.core.escalation_api import INFER_PATH
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_settings import TUNING
from hawkvision.datacenter.servers.http_server import make_http_server, max_in_flight
from hawkvision.datacenter.stages.catalog import Catalog, load_catalogs, loaded
from hawkvision.system.child_server import running, stop_with_parent
from tests.bench.ports import free_port

METHOD: Final = "/hawkvision.bench.EscalationTransport/infer"
APPLICATION: Final = "escalation"
WARM_UP: Final = 50
CALLERS: Final = (1, 16)

Ask = Callable[[], Awaitable[bytes]]


@dataclass(slots=True)
class GrpcSamples:
    """Milliseconds that callers waited, over all rounds, and how long the rounds took in seconds."""

    wall: list[float] = field(default_factory=list)
    seconds: float = 0.0


def main() -> int:
    """Run the comparison and print one row per server and concurrency."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=320, help="per round, server and concurrency")
    parser.add_argument("--variant", default="efficientnet_lite0", help="a variant of task imagenet, run as no-op")
    parser.add_argument("--serve-grpc", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_grpc is not None:
        _serve_grpc(given.serve_grpc, given.variant)
        return 0
    image = _image()
    own = ("hawkvision.datacenter", "--backend", "noop", "--port", "0", "--variants", given.variant)
    theirs = ("tests.bench.transport.escalation_grpc", "--serve-grpc", str(free_port()), "--variant", given.variant)
    with running(*own) as http, running(*theirs, env=TUNING) as proxy:
        table = asyncio.run(_measure(http.url, proxy.url, image, given.rounds, given.requests))
    print(f"{len(image)} byte JPEG, {os.cpu_count()} cores, {given.rounds} rounds of {given.requests}")
    print(f"{'server':24}{'callers':>8}{'n':>7}{'P50 ms':>9}{'P99 ms':>9}{'req/s':>8}")
    for (name, callers), samples in table.items():
        p50, p99 = np.percentile(samples.wall, (50, 99))
        n = len(samples.wall)
        print(f"{name:24}{callers:8}{n:7}{p50:9.2f}{p99:9.2f}{n / samples.seconds:8.0f}")
    return 0


async def _measure(
    http_url: str, grpc_target: str, image: bytes, rounds: int, requests: int
) -> dict[tuple[str, int], GrpcSamples]:
    async with aiohttp.ClientSession() as session, grpc.aio.insecure_channel(grpc_target) as channel:
        call = channel.unary_unary(METHOD, BytesValue.SerializeToString, BytesValue.FromString)

        async def over_http() -> bytes:
            async with session.post(http_url + INFER_PATH, data=image) as response:
                response.raise_for_status()
                return await response.read()

        async def over_grpc() -> bytes:
            reply = await call(BytesValue(value=image), metadata=(("application", APPLICATION),))
            return bytes(reply.value)

        servers: list[tuple[str, Ask]] = [("own server, HTTP", over_http), ("Serve's gRPC proxy", over_grpc)]
        table = {(name, callers): GrpcSamples() for callers in CALLERS for name, _ in servers}
        for name, ask in servers:
            reply = await ask()
            assert b'"top_k"' in reply, f"{name} answered {reply[:200]!r}"
            await _round(ask, 1, WARM_UP, GrpcSamples())
        for turn in range(rounds):
            for name, ask in servers if turn % 2 == 0 else servers[::-1]:
                for callers in CALLERS:
                    await _round(ask, callers, requests, table[name, callers])
        return table


async def _round(ask: Ask, callers: int, requests: int, into: GrpcSamples) -> None:
    async def caller() -> None:
        for _ in range(requests // callers):
            started = time.perf_counter()
            await ask()
            into.wall.append((time.perf_counter() - started) * 1e3)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    into.seconds += time.perf_counter() - started


class GrpcIngress:
    """The server of the tier behind Serve's gRPC proxy: the request's bytes in, the reply's JSON out."""

    def __init__(self, config: DatacenterConfig, *handles: Any) -> None:
        from hawkvision.datacenter.deployment.handles import HandleVariants

        ((task, catalog),) = load_catalogs(config).items()
        assert isinstance(catalog, Catalog), "load_catalogs raises if no task can be loaded"
        self._server = make_http_server(config, {task: catalog})
        self._server.tier.set_variants(task, HandleVariants(catalog.groups, handles))

    async def infer(self, image: BytesValue) -> BytesValue:
        """What the server answers to the image."""
        unread: list[Message] = [{"type": "http.request", "body": image.value, "more_body": False}]

        async def receive() -> Message:
            while not unread:
                await asyncio.Event().wait()  # nobody hangs up here
            return unread.pop()

        scope = {"type": "http", "method": "POST", "path": INFER_PATH, "headers": [], "query_string": b""}
        return BytesValue(value=bytes((await self._server.respond(Request(scope, receive))).body))


def add_escalation_to_server(servicer: Any, server: Any) -> None:
    """What `protoc` generates for `service EscalationTransport { rpc infer(BytesValue) returns (BytesValue); }`."""
    infer = grpc.unary_unary_rpc_method_handler(servicer.infer, BytesValue.FromString, BytesValue.SerializeToString)
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: infer}),))


def _serve_grpc(port: int, variant: str) -> None:
    """Run the application behind Serve's gRPC proxy, on a Ray of its own, until SIGTERM."""
    stop_with_parent()
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from hawkvision.datacenter.deployment.group_deployments import group_apps
    from tests.bench.transport import escalation_grpc  # under its importable name, by which Ray's processes find it

    config = DatacenterConfig(backend="noop", variants=(variant,))
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False, logging_level="error")
    serve.start(
        http_options=HTTPOptions(location="HeadOnly", host="127.0.0.1", port=free_port()),
        grpc_options=gRPCOptions(
            port=port, grpc_servicer_functions=["tests.bench.transport.escalation_grpc.add_escalation_to_server"]
        ),
    )
    (catalog,) = loaded(load_catalogs(config)).values()
    ingress: Any = serve.deployment(escalation_grpc.GrpcIngress)
    limit = max_in_flight(config, {catalog.task: catalog})
    app = ingress.options(max_ongoing_requests=limit, ray_actor_options={"num_cpus": 0.1})
    serve.run(app.bind(config, *group_apps(config, catalog).values()), name=APPLICATION, route_prefix="/")
    print(f"ready: 127.0.0.1:{port}", flush=True)
    signal.pause()  # Ray's own handler of SIGTERM ends the process and with it Ray


def _image() -> bytes:
    """A smooth random 500 x 375 JPEG of about 30 KB, like a typical ImageNet image."""
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.GaussianBlur(noise, (5, 5), 0), [cv2.IMWRITE_JPEG_QUALITY, 55])[1])


if __name__ == "__main__":
    sys.exit(main())
