"""What is said elsewhere of a server of datagrams: its port, and the certificate that it shows now."""

from __future__ import annotations

from pathlib import Path

from hawkvision.core.escalation_api import DatagramEndpoint, Transports
from hawkvision.transport.protocol.control import VERSION
from hawkvision.transport.protocol.identity import Identity, identity_for
from hawkvision.transport.server.listener import DatagramListener


class OfferedEndpoint:
    """A server, and the operator's files of its certificate, if there are any."""

    def __init__(
        self, server: DatagramListener, certificate: Path | None, key: Path | None, identity: Identity
    ) -> None:
        """`identity` is what the server was started with, of these files."""
        self._server = server
        self._certificate, self._key = certificate, key
        self.offer = self._of(identity)
        """Changes with `reload`."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What `reload` reads again."""
        return tuple(path for path in (self._certificate, self._key) if path is not None)

    def transports(self) -> Transports:
        """What `GET /v1/transport` says now."""
        return Transports.of(self.offer)

    def reload(self) -> None:
        """Show what the operator's files hold now to new callers, and offer that; callers inside notice nothing.

        Raises:
            ConfigError: if they cannot be used; then all stays as it was.
        """
        if self.files:
            identity = identity_for(self._certificate, self._key)
            self._server.renew(identity)
            self.offer = self._of(identity)

    def _of(self, identity: Identity) -> DatagramEndpoint:
        return DatagramEndpoint(self._server.port, identity.pem, identity.name, VERSION)
