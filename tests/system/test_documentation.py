"""Documentation is true: links lead somewhere, commands run as they stand, and options that are named exist."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hawkvision.models.sample_images import photographs
from hawkvision.system.process import ended
from tests.system import pages
from tests.system.pages import Block

READY = "ready; Ctrl-C stops both"
REFERENCE = "".join(
    (pages.ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") for name in ("cli.md", "settings.md")
)
COMMAND_BLOCKS = [
    block for page in pages.run_pages() for block in pages.blocks(page) if block.language in pages.RUN_LANGUAGES
]
ELSEWHERE = pages.ROOT / "README.md"  # test_first_screen.py runs its blocks


@pytest.fixture(scope="module")
def url(cascade: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the node of one `hawkvision up` answers, for all pages."""
    environment = pages.shell_environment(tmp_path_factory.mktemp("up"))
    program = shutil.which("hawkvision", path=environment["PATH"])
    assert program is not None
    command = [program, "up", "--port", "0", "--dc-port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as up:
        try:
            assert up.stdout is not None
            said = []
            for line in up.stdout:
                said.append(line.decode().rstrip("\n"))
                if said[-1] == READY:
                    break
            printed = "\n".join(said)
            found = re.search(r"^edge node +(http://\S+)", printed, re.MULTILINE)
            assert found is not None, printed
            yield found.group(1)
        finally:
            up.send_signal(signal.SIGINT)
            assert ended(up) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where commands run: with `images`, a folder of photographs."""
    (tmp_path / "images").mkdir()
    for image in photographs():
        shutil.copy(image, tmp_path / "images")
    return tmp_path


def test_pages_that_are_run_hold_commands() -> None:
    assert {block.page.name for block in COMMAND_BLOCKS if block.is_run} >= {"README.md", "quickstart.md"}


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=lambda block: block.place)
def test_every_option_of_our_commands_is_in_the_reference(block: Block) -> None:
    for command in block.commands():
        if re.match(r"(\S*/)?hawkvision ", command):
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", command):
                assert option in REFERENCE or option[2:].replace("-", "_") in REFERENCE, f"{block.place}: {option}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in pages.run_pages() if page != ELSEWHERE],
    ids=lambda page: str(page.relative_to(pages.ROOT)),
)
def test_blocks_of_a_page_run_in_their_order(page: Path, url: str, folder: Path) -> None:
    environment = {**pages.shell_environment(folder), "HAWKVISION_URL": url}
    address = url.removeprefix("http://")
    before: list[str] = []
    for block in pages.blocks(page):
        if not block.is_run:
            continue
        given = block.text if block.language == "python" else "\n".join(block.commands())
        script = given.replace(pages.DEFAULT_URL.removeprefix("http://"), address)
        lines = [line for line in script.splitlines() if line != pages.SERVE]
        if block.language == "python":
            pages.run_block(block, "\n".join(lines), folder, environment)
            continue
        # Variables of earlier blocks are still known in the terminal.
        pages.run_block(block, "\n".join([*before, *lines]), folder, environment)
        before += [line for line in lines if re.match(r"[A-Za-z_]+=", line)]
