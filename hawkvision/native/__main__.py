"""Compiles the kernel beside its source, for images that are built where a compiler is and run where none is."""

from __future__ import annotations

import sys

from hawkvision.core.errors import BackendError
from hawkvision.native.library import FOLDER, build
from hawkvision.system.process import exit_on_sigterm


def main() -> int:
    """0; or 1 and the reason on standard error."""
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
