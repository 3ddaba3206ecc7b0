"""How many examples a property test draws: few at each change, many in a nightly run.

HAWKVISION_EXAMPLES=nightly pytest ...
"""

from __future__ import annotations

import os
from typing import Final

NIGHTLY: Final = os.environ.get("HAWKVISION_EXAMPLES") == "nightly"
EXAMPLES: Final = 500 if NIGHTLY else 40
"""Of tests that state no number."""
SHARE: Final = 5
"""A nightly run draws this many times as many examples."""


def examples(nightly: int) -> int:
    """The examples of a test that draws so many in a nightly run; `max_examples` of hypothesis."""
    return nightly if NIGHTLY else nightly // SHARE
