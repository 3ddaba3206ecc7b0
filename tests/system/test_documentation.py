"""Documentation is true: links lead somewhere, commands run as they stand, and options that are named exist.

Commands that serve are started at free ports and stopped at the end of their page, and what comes after them on the
page asks them. Without options they are the two tiers of one `hawkvision up`, which all pages share.
"""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hawkvision.models.sample_images import photographs
from hawkvision.system.child_server import running
from tests.system import pages
from tests.system.conftest import Up
from tests.system.pages import Block

SERVERS = ("hawkvision up", "hawkvision edge up", "hawkvision dc up")
REFERENCE = "".join(
    (pages.ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") for name in ("cli.md", "settings.md")
)
COMMAND_BLOCKS = [
    block for page in pages.run_pages() for block in pages.blocks(page) if block.language in pages.RUN_LANGUAGES
]
HERE = [block for block in COMMAND_BLOCKS if block.is_run and block.machine is None]
"""Others are run by test_two_machines.py."""
RUN_HERE = sorted({block.page for block in HERE} - {pages.ROOT / "README.md"})
"""README's blocks are run by test_first_screen.py."""
PAGES_ABOUT_THE_CODE = [page for page in pages.PAGES if page.name != "CHANGELOG.md" and "benchmarks" not in page.parts]


def name_of(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


@pytest.fixture
def port(both: Up) -> int:
    """Where the node of one `hawkvision up` answers, for all pages."""
    return urlsplit(both.address("edge node")).port or 0


class Terminal:
    """Runs the blocks of one page, in their order, in a folder with `cat.jpg`."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        self._folder = folder
        self._environment = pages.shell_environment(folder) | {"HAWKVISION_EDGE_PORT": "0", "HAWKVISION_DC_PORT": "0"}
        self._variables: list[str] = []
        self._servers = ExitStack()
        shutil.copy(photographs()[0], folder / "cat.jpg")  # what a file is, its bytes say

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()

    def run(self, block: Block) -> None:
        """Run a block; it fails if a command does."""
        if block.language == "python":
            self._ask(block, block.text)
        waiting: list[str] = []
        for command in block.commands():
            if not command.startswith(SERVERS):
                waiting.append(command)
                self._variables += [command] if re.match(r"\w+=", command) and len(shlex.split(command)) == 1 else []
                continue
            self._ask(block, "\n".join(waiting))
            waiting = []
            if command not in SERVERS:
                self._serve(command)
        self._ask(block, "\n".join(waiting))

    def _ask(self, block: Block, script: str) -> None:
        if block.language == "console":
            script = "\n".join([*self._variables, script])
        script = re.sub(r"(127\.0\.0\.1|localhost):8080", rf"\1:{self._port}", script)
        environment = self._environment | {"HAWKVISION_URL": f"http://127.0.0.1:{self._port}"}
        pages.run_block(block, script, self._folder, environment)

    def _serve(self, command: str) -> None:
        words = shlex.split(re.sub(r"-port \d+", "-port 0", command))[1:]
        there = ("env", "--chdir", str(self._folder))
        server = running("hawkvision.cli", *words, env=self._environment, prefix=there)
        self._port = self._servers.enter_context(server).port


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert pages.broken_links(page) == []


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=lambda block: block.place)
def test_every_option_of_our_commands_is_in_the_reference(block: Block) -> None:
    for command in block.commands():
        if re.match(r"(\S*/)?hawkvision (?!load)", command):
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", command):
                assert option in REFERENCE or f"`{option[2:].replace('-', '_')}`" in REFERENCE, option


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_blocks_of_a_page_run_in_their_order(page: Path, port: int, tmp_path: Path) -> None:
    run = [block for block in HERE if block.page == page]
    for program in ("curl", "openssl"):
        if shutil.which(program) is None and any(program in block.text for block in run):
            pytest.skip(f"{program} is not installed (apt-get install {program})")
    with Terminal(port, tmp_path) as terminal:
        for block in run:
            terminal.run(block)


@pytest.mark.parametrize("page", PAGES_ABOUT_THE_CODE, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:hawkvision|edge|fpga|loadgen|tests)/[\w/]*\.py)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (pages.ROOT / path).exists()] == []
