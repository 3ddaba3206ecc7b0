"""What a tier process tells its launcher: words over their socket, and an exit status."""

from __future__ import annotations

from typing import Final

LISTENING: Final = b"listening"
"""What the tier process says when it answers callers itself."""
READY: Final = b"ready"
"""When all its models are loaded."""
LEAVING: Final = b"leaving"
"""When it does not take callers any more."""
ALIVE: Final = b"alive"
"""Every `BEAT_S`."""
BEAT_S: Final = 0.5
RAY_DIED: Final = 75
"""The exit status of a tier process that Ray has left (sysexits.h: EX_TEMPFAIL)."""
