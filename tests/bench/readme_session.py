"""Draws README's figure: a real session of `hawkvision up` and `hawkvision classify`, as an SVG of the terminal.

    python -m tests.bench.readme_session

It starts both tiers at their default ports, writes docs/images/session.svg, and stops them. The images are photographs
of scikit-image (`pip install '.[demo]'`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from hawkvision.models.sample_images import photographs
from hawkvision.system.child_server import ended, stop_with_parent

FIGURE: Final = Path(__file__).resolve().parents[2] / "docs" / "images" / "session.svg"
COLUMNS: Final = 88
READY: Final = "ready; Ctrl-C stops both"
CLASSIFY: Final = (
    "hawkvision classify chelsea.png coffee.png camera.png --quality fast",
    "hawkvision classify chelsea.png coffee.png camera.png --max-accuracy-drop 0.01",
)


@contextlib.contextmanager
def both_tiers() -> Iterator[list[str]]:
    """The lines that `hawkvision up` prints until it is ready; it serves as long as the block lasts.

    Raises:
        SystemExit: if it ends before that.
    """
    command = [sys.executable, "-m", "hawkvision.cli", "up"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=stop_with_parent) as up:
        assert up.stdout is not None
        try:
            lines = []
            for line in up.stdout:
                lines.append(line.decode().rstrip("\n"))
                if lines[-1] == READY:
                    break
            else:
                sys.exit("hawkvision up ended; its lines on standard error say why")
            yield lines
        finally:
            up.send_signal(signal.SIGINT)
            ended(up)


def answered(command: str, folder: Path) -> str:
    """What a command prints on a terminal of `COLUMNS` columns; it runs in `folder`."""
    terminal = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    program, *words = shlex.split(command)
    ran = subprocess.run(
        [sys.executable, "-m", f"{program}.cli", *words],
        cwd=folder,
        env={**os.environ, **terminal},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout


def session() -> Iterator[Text]:
    """The lines of the figure."""
    images = photographs()
    if not images:
        sys.exit("no images: pip install '.[demo]'")
    with both_tiers() as printed:
        yield prompt("hawkvision up")
        # Of its request and answer as JSON, which are too wide for a figure, README shows the first.
        example = next(place for place, line in enumerate(printed) if line.startswith("$ "))
        yield from map(Text, [*printed[:example], "…", READY, ""])
        for command in CLASSIFY:
            yield prompt(command)
            yield from Text.from_ansi(answered(command, images[0].parent).rstrip() + "\n").split("\n")
            yield Text()


def prompt(command: str) -> Text:
    """A command as it is typed."""
    return Text.assemble(("$ ", "green"), (command, "bold"))


def drawn() -> str:
    """The figure, without fonts from elsewhere, which viewers would load or refuse."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in session():
        console.print(line, no_wrap=True, overflow="ellipsis")
    svg = console.export_svg(title="HawkVision", theme=MONOKAI, unique_id="session")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> int:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURE, help="the SVG file")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(drawn() + "\n", encoding="utf-8")
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
