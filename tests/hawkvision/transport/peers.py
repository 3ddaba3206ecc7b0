"""A datagram server and its clients on loopback, for tests; everything is closed when the test leaves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from hawkvision.servers.keys import Keys
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.server_certificate import Identity, own_identity
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import Handler, Incoming

IDENTITY = own_identity()
LOOPBACK = UdpRoute(None, "127.0.0.1")


async def echo(incoming: Incoming) -> tuple[Status, bytes]:
    """Answer with what was asked."""
    return Status.OK, incoming.template + b" " + incoming.meta


@contextlib.asynccontextmanager
async def serving(
    handler: Handler = echo,
    *,
    keys: Keys | None = None,
    port: int = 0,
    identity: Identity = IDENTITY,
    congestion: CongestionFactory = LossTolerant,
) -> AsyncIterator[DatagramListener]:
    """A server on a free port."""
    server = await DatagramListener.start("127.0.0.1", port, identity, handler, keys=keys, congestion=congestion)
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(
    port: int,
    *,
    api_key: str | None = None,
    certificate: str = IDENTITY.pem,
    name: str = IDENTITY.name,
    routes: Sequence[UdpRoute] = (LOOPBACK,),
    congestion: CongestionFactory = LossTolerant,
    timeout_s: float = 60.0,
) -> AsyncIterator[ClientConnection]:
    """A client with a session."""
    client = await ClientConnection.connect(
        port, certificate, name, routes=routes, api_key=api_key, congestion=congestion, timeout_s=timeout_s
    )
    try:
        yield client
    finally:
        await client.close()
