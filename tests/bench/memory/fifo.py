"""A node as `hawkvision edge up`, whose models leave in the order in which they were loaded, however recently used."""

from __future__ import annotations

import sys
from typing import Any

from edge.inference.resident_models import ResidentStage
from edge.run import run


def main() -> int:
    """Run the node of the command line."""
    enter, load = ResidentStage.__enter__, ResidentStage._load

    def entered(self: ResidentStage) -> None:
        first = self.used
        enter(self)
        self.used = first or self.used

    async def loaded(self: ResidentStage, *given: Any) -> None:
        self.used = 0
        await load(self, *given)

    ResidentStage.__enter__, ResidentStage._load = entered, loaded  # type: ignore[method-assign,assignment]
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
