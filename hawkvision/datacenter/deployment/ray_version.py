"""Which versions of Ray may be started: those that ask for a token at every port, and that have been tried.

Before 2.58.1 some ports run what they are sent, whoever sends it. `python -m tests.bench.exposure` is the trial; a
newer version may come in once it passes.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

from hawkvision.core.errors import ConfigError

OLDEST: Final = (2, 58, 1)
BEFORE: Final = (2, 61, 0)
"""The first that has not been tried. The bounds in pyproject.toml are the same."""


def check_ray(installed: str | None = None) -> None:
    """Refuse to go on with another Ray; None looks up what is installed, without importing it.

    Raises:
        ConfigError: saying which version is there and which are taken.
        ModuleNotFoundError: if there is none.
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
            f"Ray {installed} is installed; expected at least {oldest} and below {before}, for older ones run code for "
            f"whoever reaches their ports, and newer ones are untried: pip install 'ray[serve]>={oldest},<{before}'"
        )
