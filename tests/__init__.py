"""Tests, and benches."""

import contextlib

with contextlib.suppress(ModuleNotFoundError):  # handlers of benches run in environments of other servers
    import hawkvision.system.library_environment  # noqa: F401  before OpenCV, which some of them import first
