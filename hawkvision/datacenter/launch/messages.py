"""The messages of a tier process to its launcher: words over their socket, and an exit status."""

from __future__ import annotations

from typing import Final

LISTENING: Final = b"listening"
"""The tier process answers callers itself."""
READY: Final = b"ready"
"""All models are loaded."""
LEAVING: Final = b"leaving"
"""It takes no more callers."""
ALIVE: Final = b"alive"
"""The event loop runs; sent every `BEAT_S`."""
BEAT_S: Final = 0.5
RAY_DIED: Final = 75
"""The exit status after a death in Ray (sysexits.h: EX_TEMPFAIL)."""
