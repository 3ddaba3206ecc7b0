"""The offer of a datagram server: its port, and the certificate that it shows now."""

from __future__ import annotations

from pathlib import Path

from hawkvision.core.escalation_api import DatagramEndpoint, Transports
from hawkvision.transport.protocol.control import VERSION
from hawkvision.transport.protocol.server_certificate import Identity, identity_for
from hawkvision.transport.server.listener import DatagramListener


class OfferedEndpoint:
    """A datagram server, and the operator's certificate files, if there are any."""

    def __init__(
        self, server: DatagramListener, certificate: Path | None, key: Path | None, identity: Identity
    ) -> None:
        """`identity` is the server's, read from these files."""
        self._server = server
        self._certificate, self._key = certificate, key
        self.offer = self._of(identity)
        """`reload` changes it."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that `reload` reads."""
        return tuple(path for path in (self._certificate, self._key) if path is not None)

    def transports(self) -> Transports:
        """The reply to `GET /v1/transport`."""
        return Transports(self.offer)

    def reload(self) -> None:
        """Read the operator's files again, and show and offer the new certificate; open connections go on.

        Raises:
            ConfigError: if the files cannot be used; the old certificate stays.
        """
        if self.files:
            identity = identity_for(self._certificate, self._key)
            self._server.renew(identity)
            self.offer = self._of(identity)

    def _of(self, identity: Identity) -> DatagramEndpoint:
        return DatagramEndpoint(self._server.port, identity.pem, identity.name, VERSION)
