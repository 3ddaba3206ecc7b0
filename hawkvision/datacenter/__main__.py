"""`python -m hawkvision.datacenter`: the datacenter tier on this machine, for parents that start it as a process."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from hawkvision.config import DatacenterConfig, load_config
from hawkvision.datacenter.run import up
from hawkvision.errors import HawkVisionError

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Read settings, serve until told to stop; 2 for a mistake in the settings."""
    parser = argparse.ArgumentParser(prog="python -m hawkvision.datacenter", description=main.__doc__)
    parser.add_argument("--config", type=Path, help="TOML file with a [dc] section")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, help="0 takes a free port; the ready line names it")
    parser.add_argument("--backend", choices=("onnxruntime", "numpy", "noop"))
    parser.add_argument("--variants", help="rungs, comma-separated; default: the manifest's ladder.dc")
    parser.add_argument("--with-parent", action="store_true", help="stop when the process that started this one dies")
    given = parser.parse_args()
    if given.with_parent:
        _stop_with_parent()
    overrides = {
        "host": given.host,
        "port": given.port,
        "backend": given.backend,
        "variants": given.variants.split(",") if given.variants else None,
    }
    try:
        up(load_config(DatacenterConfig, given.config, overrides))
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  the command's output
        return 2
    return 0


def _stop_with_parent() -> None:
    """Have the kernel send SIGTERM when our parent dies, however it dies (Linux)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
