"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

from hawkvision.core.errors import NotReady

PORTS: Final = range(20_000, 32_000)
"""Ray keeps 10002 to 19999 for its workers, and does not start where another of its ports is among them. The kernel
gives ports from 32768 on to those who connect or who ask for any: one of these may be gone when a server takes it."""
TRIES: Final = 100


def free_port() -> int:
    """A port on loopback that nothing listened at a moment ago, and that nobody takes by chance meanwhile.

    Raises:
        NotReady: if none of `TRIES` is free.
    """
    for port in random.SystemRandom().sample(PORTS, TRIES):  # nobody's seed leads two workers to the same one
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise NotReady(f"{TRIES} ports from {PORTS.start} to {PORTS.stop - 1} are all taken")
