"""Compile the kernels beside their source, for container images that have no compiler at run time."""

from __future__ import annotations

import sys

from hawkvision.core.errors import BackendError
from hawkvision.native.library import FOLDER, build
from hawkvision.system.child_server import exit_on_sigterm


def main() -> int:
    """Return 0, or 1 with the reason on standard error."""
    exit_on_sigterm()
    try:
        path = build(FOLDER)
    except BackendError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
