"""What holds for all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from hawkvision.core import advice

ROOT: Final = Path(__file__).parent
TOGETHER: Final = ("hawkvision/datacenter", "system")
"""Folders of which one worker runs all tests, for they share tiers of Ray, which are slow to start; the longest first.
All others are given out by the file, so that all workers are busy until the end."""

# No test may depend on how busy the machine is; a hanging one is ended by pytest-timeout.
settings.register_profile("hawkvision", deadline=None)
settings.load_profile("hawkvision")

# A shell makes what it starts in the background deaf to Ctrl-C, which processes inherit; tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Nodes that tests start keep what they learn of streams, and must not find what others left.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hawkvision-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def together(nodeid: str) -> str:
    """What a test shares its worker with: its folder if that is one of `TOGETHER`, else its file."""
    file = nodeid.partition("::")[0].removeprefix(f"{ROOT.name}/")
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


@pytest.fixture(autouse=True)
def nothing_given() -> None:
    """Messages advise commands with the options of the process, which many tests share."""
    advice.forget()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a folder of `TOGETHER`, or else a file, to one worker, in the order in which they were collected.

    Not by `--dist loadgroup`: it marks names of tests in a way that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist gives no types away
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    config.option.loadscopereorder = False  # xdist would begin with whatever has the most tests
    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers run them, begin with the folders of `TOGETHER`."""
    if hasattr(config, "workerinput"):
        rank = {folder: number for number, folder in enumerate(TOGETHER)}
        items.sort(key=lambda item: rank.get(together(item.nodeid), len(rank)))
