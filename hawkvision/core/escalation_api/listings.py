"""What the datacenter tier says of itself: the stages that it serves, and where its other transports listen."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

STAGES_PATH: Final = "/v1/stages"
TRANSPORT_PATH: Final = "/v1/transport"


class StageMember(msgspec.Struct, frozen=True):
    """A variant and the hash of the loaded file; None for a backend without a file (`noop`)."""

    name: str
    sha256: str | None


class ListedStage(msgspec.Struct, frozen=True):
    """One stage that can be requested: a variant, or an ensemble."""

    name: str
    members: tuple[StageMember, ...]
    fingerprint: str | None = None
    """`Manifest.fingerprint` of the configured files, inputs, temperatures and averaging. None without files, or with
    an execution that certificates do not cover."""
    ran: str | None = None
    """`hawkvision.models.fingerprints.stage_fingerprint` of the newest statement of a replica; None before the first.
    """


class StageList(msgspec.Struct, frozen=True):
    """The stages that the tier serves, cheapest first."""

    task: str
    best: str
    stages: tuple[ListedStage, ...]


class DatagramEndpoint(msgspec.Struct, frozen=True):
    """Where the datagram transport listens, on the host that sent this document."""

    port: Annotated[int, Meta(description="UDP port.")]
    certificate: Annotated[str, Meta(description="PEM; the first is what the server must present, bit for bit.")]
    name: Annotated[str, Meta(description="The server name for the handshake.")]
    version: Annotated[int, Meta(description="Version of the wire format, `hawkvision/transport/WIRE.md`.")]


class Transports(msgspec.Struct, frozen=True):
    """The reply to `GET /v1/transport`."""

    datagram: Annotated[DatagramEndpoint | None, Meta(description="Null if the server takes no datagrams.")] = None
