"""The version of this release."""

from typing import Final

__version__: Final = "0.2.0"
