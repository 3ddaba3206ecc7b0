"""How many examples a property test draws: few at each change, many in a nightly run.

HAWKVISION_EXAMPLES=nightly pytest ...  (or a number: so many times as many as at each change)
"""

from __future__ import annotations

import os
from typing import Final

SHARE: Final = 5
"""A nightly run draws this many times as many examples."""
ASKED: Final = os.environ.get("HAWKVISION_EXAMPLES", "1")
TIMES: Final = SHARE if ASKED == "nightly" else int(ASKED)
EXAMPLES: Final = 500 if ASKED == "nightly" else 40 * TIMES
"""Of tests that state no number."""


def examples(nightly: int) -> int:
    """The examples of a test that draws so many in a nightly run; `max_examples` of hypothesis."""
    return nightly * TIMES // SHARE
