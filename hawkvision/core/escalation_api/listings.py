"""What the datacenter tier says of itself: the stages that it serves, and where its other transports listen."""

from __future__ import annotations

from typing import Final

import msgspec

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

    port: int
    """UDP port."""
    certificate: str
    """PEM. The server presents the first certificate, which the caller compares bit for bit."""
    name: str
    """Server name for the handshake."""
    version: int
    """Version of the hello message."""


class Transports(msgspec.Struct, frozen=True):
    """The reply to `GET /v1/transport`."""

    datagram: DatagramEndpoint | None = None
