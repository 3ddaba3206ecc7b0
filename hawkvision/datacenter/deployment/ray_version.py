"""The supported versions of Ray: those that ask for a token at every port and have been tried.

Before 2.58.1 some ports run any code that they are sent. A newer version is supported once
`python -m tests.bench.robustness.exposure` passes with it.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

from hawkvision.core.errors import ConfigError

OLDEST: Final = (2, 58, 1)
BEFORE: Final = (2, 61, 0)
"""The first untried version. pyproject.toml has the same bounds."""


def check_ray(installed: str | None = None) -> None:
    """Refuse an unsupported Ray; None looks up the installed version without importing it.

    Raises:
        ConfigError: names the installed and the supported versions.
        ModuleNotFoundError: if Ray is not installed.
    """
    if installed is None:
        try:
            installed = importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError("No module named 'ray'", name="ray") from None
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\+|$)", installed)
    if numbers is None or not OLDEST <= tuple(map(int, numbers.groups())) < BEFORE:
        oldest, before = (".".join(map(str, its)) for its in (OLDEST, BEFORE))
        raise ConfigError(
            f"Ray {installed} is installed; expected at least {oldest} and below {before}: older ones run code of "
            f"anybody who reaches their ports, and newer ones are untried: pip install 'ray[serve]>={oldest},<{before}'"
        )
