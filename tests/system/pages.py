"""The pages of the documentation: their code blocks, commands and links.

A block that cannot be run here has a comment on a line before it: `<!-- not run: REASON -->`. One that belongs to one
of the machines of `tests/system/cluster/machines.py` has `<!-- on: NAME -->`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
RUN_PAGES: Final = ("README.md", "docs/quickstart.md", "docs/own-models.md", "docs/operations/*.md")
"""Pages whose blocks of commands are all run, or state why they cannot be."""
RUN_LANGUAGES: Final = frozenset({"console", "sh", "bash", "python"})
SERVE: Final = "hawkvision up"
"""The command that serves in one terminal while the other blocks are run in a second."""
COMMAND_LIMIT_S: Final = 240.0

_FENCE: Final = re.compile(r"^```(\w*)$")
_NOT_RUN: Final = re.compile(r"^<!-- not run: (\S.*) -->$")
_ON: Final = re.compile(r"^<!-- on: (\w+) -->$")
_LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    """Why it is not run; None if it is."""
    machine: str | None = None
    """The machine on which it is run; None for this one."""

    @property
    def place(self) -> str:
        """Names it in messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether it holds commands or a program, and nothing says why it cannot be run."""
        return self.language in RUN_LANGUAGES and self.not_run is None

    def commands(self) -> list[str]:
        """Shell commands, in their order; a backslash continues one on the next line."""
        if self.language == "python":
            return []
        lines = self.text.replace("\\\n", "").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith(("$ ", "# "))]
        return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page."""
    found: list[Block] = []
    started: tuple[int, str] | None = None
    reason: str | None = None
    machine: str | None = None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if started is not None:
            if line == "```":
                begin, language = started
                text = "\n".join(lines[begin : number - 1]) + "\n"
                found.append(Block(page, begin, language, text, reason, machine))
                started, reason, machine = None, None, None
        elif fence is not None:
            started = number, fence.group(1)
        elif marked := _NOT_RUN.match(line):
            reason = marked.group(1)
        elif placed := _ON.match(line):
            machine = placed.group(1)
        elif line.strip():
            reason, machine = None, None
    assert started is None, f"{page}: a block is not closed"
    return found


def run_pages() -> list[Path]:
    """The pages of `RUN_PAGES`."""
    return [path for pattern in RUN_PAGES for path in sorted(ROOT.glob(pattern))]


def shell_environment(folder: Path) -> dict[str, str]:
    """Variables of a terminal in which this environment is activated; what servers keep goes below `folder`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}


def run_block(
    block: Block, script: str, folder: Path, environment: dict[str, str], entering: Sequence[str] = ()
) -> str:
    """Run what a block holds in `folder`, and give what it prints; an error names the block.

    Args:
        entering: a command that becomes the shell or Python behind it, somewhere else.
    """
    program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-e", "-u", "-o", "pipefail", "-c"]
    ran = subprocess.run(
        [*entering, *program, script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
    )
    assert ran.returncode == 0, f"{block.place}: exit status {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    found: set[str] = set()
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and re.match(r"#{1,6} ", line):
            heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for link in _LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(f"{page.relative_to(ROOT)}: {link}")
    return wrong
