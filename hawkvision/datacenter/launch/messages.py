"""The messages of a tier process to its launcher and back: over their socket, and an exit status."""

from __future__ import annotations

from typing import Any, Final

import msgspec

READY: Final = b"ready"
"""The application serves, and all models are loaded."""
LOST: Final = b"lost"
"""A process without which Ray cannot go on has died; the tier process ends within `ABANDON_S`."""
ABANDON_S: Final = 1.0
"""What the requests inside have to end after a death in Ray."""
RAY_DIED: Final = 75
"""The exit status after a death in Ray (sysexits.h: EX_TEMPFAIL)."""
SETTINGS_BYTES: Final = 256 * 1024
"""The longest `TierSettings`; settings have a few kB."""


class TierSettings(msgspec.Struct, frozen=True):
    """What a tier process is told first, as JSON."""

    config: dict[str, Any]
    """The settings that differ from their defaults (`settings.load.chosen_settings`)."""
    folder: str
    """Private, for Ray's sockets and logs."""
    launcher: str
    """The Unix socket where ingress replicas get the public sockets."""
    private_network: bool
    """Whether Ray gets a network of its own."""
