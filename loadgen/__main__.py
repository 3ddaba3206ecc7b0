"""`python -m loadgen COMMAND`: test a deployment from outside, before trusting it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from hawkvision.errors import HawkVisionError
from loadgen import evaluate


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for an error that was explained, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m loadgen", description="Test a deployment from outside.")
    commands = parser.add_subparsers(dest="command", required=True)
    evaluate.add_arguments(commands.add_parser("evaluate", help=evaluate.SUMMARY, description=evaluate.SUMMARY))
    try:
        asyncio.run(evaluate.run(parser.parse_args(argv)))
    except HawkVisionError as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{where}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
