"""How many examples a property test draws: few at each change, many in a nightly run.

HAWKVISION_EXAMPLES=nightly pytest ...  (or a number: so many times as many as at each change)
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck

SHARE: Final = 5
"""A nightly run draws this many times as many examples."""
ASKED: Final = os.environ.get("HAWKVISION_EXAMPLES", "1")
DERANDOMIZE: Final = ASKED == "1"
"""The examples of each change are the same in every run, as in hypothesis's own profile for CI: what fails there was
made by the change. Other runs draw new ones."""
TIMES: Final = SHARE if ASKED == "nightly" else int(ASKED)
EXAMPLES: Final = 500 if ASKED == "nightly" else 40 * TIMES
"""Of tests that state no number."""


IMPATIENT: Final = [HealthCheck.too_slow]
"""Checks that hypothesis leaves out: a busy machine stands still now and then."""
SHARED_FIXTURE: Final = [*IMPATIENT, HealthCheck.function_scoped_fixture]
"""The same where examples may share a fixture, such as a folder or a server."""


def examples(nightly: int) -> int:
    """The examples of a test that draws so many in a nightly run; `max_examples` of hypothesis."""
    return nightly * TIMES // SHARE
