"""What the datacenter tier says of itself: the stages that it serves, and where its other transports listen."""

from __future__ import annotations

from typing import Final

import msgspec

STAGES_PATH: Final = "/v1/stages"
PREVIOUS_STAGES_PATH: Final = "/v1/rungs"
"""The path of the stages for edge nodes before 0.2; served until 0.3."""
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


class PreviousStages(msgspec.Struct, frozen=True):
    """The reply to `GET /v1/rungs`: `StageList` as edge nodes before 0.2 read it."""

    task: str
    best: str
    rungs: tuple[ListedStage, ...]

    @classmethod
    def of(cls, listing: StageList) -> PreviousStages:
        """The same list in the old form."""
        return cls(listing.task, listing.best, listing.stages)


class DatagramEndpoint(msgspec.Struct, frozen=True):
    """Where the datagram transport listens, on the host that sent this document."""

    port: int
    """UDP port."""
    certificate: str
    """PEM. The server presents the first certificate, which the caller compares bit for bit."""
    name: str
    """Server name for the handshake; version 1 also checked it against the certificate."""
    version: int
    """Version of the hello message."""


class Transports(msgspec.Struct, frozen=True):
    """The reply to `GET /v1/transport`."""

    datagram: DatagramEndpoint | None = None
    lossy: DatagramEndpoint | None = None
    """The same endpoint, for callers and edge nodes before 0.2; sent until 0.3."""

    @classmethod
    def of(cls, endpoint: DatagramEndpoint | None) -> Transports:
        """The reply of a server with that datagram endpoint."""
        return cls(endpoint, endpoint)
