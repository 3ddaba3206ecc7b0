"""The messages and the exit status by which the tier process tells the launcher how it is."""

from __future__ import annotations

from typing import Final

READY: Final = b"ready"
"""The application serves, and all models are loaded."""
LOST: Final = b"lost"
"""A process without which Ray cannot go on has died; the tier process ends within `ABANDON_S`."""
ABANDON_S: Final = 1.0
"""What the requests inside have to end after a death in Ray."""
RAY_DIED: Final = 75
"""The exit status after a death in Ray (sysexits.h: EX_TEMPFAIL)."""
