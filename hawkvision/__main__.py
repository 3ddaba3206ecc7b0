"""The command `hawkvision`. Servers start without Typer, which they import only for `--help` and wrong words."""

from __future__ import annotations

import sys

from hawkvision.system.terminal import write_anything


def main() -> None:
    """Entry point of the console script."""
    write_anything()
    match sys.argv[1:3]:
        case ["edge", "up"]:
            from edge.__main__ import main as edge_up

            sys.exit(edge_up(sys.argv[3:]))
        case ["dc", "up"]:
            from hawkvision.datacenter.__main__ import main as datacenter_up

            sys.exit(datacenter_up(sys.argv[3:]))
        case _:
            from hawkvision.cli import main as command

            command()


if __name__ == "__main__":
    main()
