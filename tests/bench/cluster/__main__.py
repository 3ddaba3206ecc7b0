"""The datacenter tier on a real Ray of several nodes on this machine.

    python -m tests.bench.cluster scaling      requests per second with 1, 2 and 4 nodes
    python -m tests.bench.cluster cost         processor time per request, and the rate of one ingress
    python -m tests.bench.cluster autoscaling  replicas and nodes under load and after it
    python -m tests.bench.cluster faults       killed nodes and processes, updates, a restarted head

Needs root: each node has a network namespace of its own. Redis (`apt-get install redis-server`) is needed by `faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from hawkvision.core.errors import HawkVisionError
from tests.bench.cluster import autoscaling, cost, faults, scaling

STUDIES: Final[dict[str, Any]] = {
    "scaling": scaling,
    "cost": cost,
    "autoscaling": autoscaling,
    "faults": faults,
}


def main() -> int:
    """Run from the command line; the exit status is 1 after a printed error or if a goal was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="study", required=True)
    for name, study in STUDIES.items():
        command = commands.add_parser(name, help=study.SUMMARY, description=study.__doc__)
        study.add_arguments(command)
        command.add_argument("--out", type=Path, help="where the rows go, as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all nodes are stopped
    try:
        rows = asyncio.run(STUDIES[given.study].run(given, Console(width=200)))
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
