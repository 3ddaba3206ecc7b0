"""Where a Ray cluster is."""

from __future__ import annotations

import socket
from typing import Final

from hawkvision.core.errors import ConfigError

_CONNECT_S: Final = 5.0


def check_address(address: str) -> None:
    """Refuse an address where nothing listens; Ray would try for two minutes and then end the process.

    Raises:
        ConfigError: if it is not of the form, or nothing listens there.
    """
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"dc.address = {address!r}: expected auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"dc.address: no Ray cluster answers at {address!r}: {error}") from None
