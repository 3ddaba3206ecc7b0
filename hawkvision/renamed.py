"""Names that releases before 0.2 had, refused with an error that says what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

RENAMED_NAMES: Final = {"AccuracyPromise": "AccuracyGuarantee"}
"""Old names of the package, and the new ones."""

_PUBLIC: Final = "import its public names from hawkvision itself"
MOVED_MODULES: Final = {
    "hawkvision.types": _PUBLIC,
    "hawkvision.errors": _PUBLIC,
    "hawkvision.client_batch": _PUBLIC,
    "hawkvision.client_replies": _PUBLIC,
    "hawkvision.lossy": "use hawkvision.Client(url, transport='datagram')",
    "hawkvision.config": "use hawkvision.core.settings.config and hawkvision.core.settings.load",
    "hawkvision.manifest": "use hawkvision.models.manifest",
    "hawkvision.pictures": "use hawkvision.models.datasets",
    "hawkvision.vision": "use hawkvision.imaging and hawkvision.inference",
    "hawkvision.zoo": "use hawkvision.model_zoo",
}
"""Old modules, and what to do instead."""


class _MovedModules(MetaPathFinder):
    """Asked for a module after all other finders."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """None for modules that were never there.

        Raises:
            ModuleNotFoundError: for one that has moved; says where to.
        """
        if fullname in MOVED_MODULES:
            raise ModuleNotFoundError(f"{fullname} has moved; {MOVED_MODULES[fullname]}", name=fullname)
        return None


def refuse_old_modules() -> None:
    """Explain imports of `MOVED_MODULES` from now on."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
