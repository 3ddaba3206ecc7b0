"""Compiles the kernel beside its source, for images that are built where a compiler is and run where none is."""

from __future__ import annotations

import sys

from hawkvision.errors import BackendError
from hawkvision.vision.int8.library import beside_source, build


def main() -> int:
    """0; or 1 and the reason on standard error."""
    path = beside_source()
    try:
        build(path)
    except BackendError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
