"""The words that all rooms share: types, errors, settings, metrics, the wire between the tiers."""

from typing import Final

__version__: Final = "0.2.0"
"""The version of this release."""
