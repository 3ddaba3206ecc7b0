"""`python -m tests.bench.guarantee`: is what the guarantee says true? One program, a subcommand for each question."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any, Final

from tests.bench.guarantee import certificates, defaults, delays, fractional_losses, labels, node, review, scenarios

PARTS: Final[dict[str, Any]] = {
    "certificates": certificates,
    "defaults": defaults,
    "fractions": fractional_losses,
    "labels": labels,
    "delays": delays,
    "node": node,
    "review": review,
    "scenarios": scenarios,
}
"""Modules with `SUMMARY`, `add_arguments` and `run`."""


def main() -> int:
    """Run one part; its exit status is 1 if something was said that is not so."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.guarantee", description=__doc__)
    parts = parser.add_subparsers(required=True)
    for name, part in PARTS.items():
        one = parts.add_parser(
            name, help=part.SUMMARY, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.add_arguments(one)
        one.set_defaults(run=part.run)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    status: int = given.run(given)
    return status


if __name__ == "__main__":
    sys.exit(main())
