"""Fixtures and settings for all tests."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from hawkvision.core import advice
from tests.fuzz.examples import DERANDOMIZE, EXAMPLES, IMPATIENT

ROOT: Final = Path(__file__).parent
TOGETHER: Final = ("hawkvision/datacenter", "system")
"""Folders whose tests all run in one worker, because they share Ray tiers, which are slow to start; the longest first.
Other tests are distributed by file, so that all workers are busy until the end."""

SHARED: Final = {"both": -1, "noop_tier": 1, "service": 1}
"""Tiers of these folders that several files use, and whether their tests come before the folder's others (-1) or after
them (1). A test ends the first, and pytest the others when it leaves the folder: an idle tier is not free."""

LONG: Final = (
    "test_tidy.py",
    "edge/serving/test_image.py",
    "loadgen/commands/test_run.py",
    "loadgen/commands/test_find_capacity_command.py",
)
"""Files that take a minute, mypy without its cache among them. They begin early, so that no worker ends with one."""

# No test may depend on how busy the machine is; a hanging one is ended by pytest-timeout. A change is judged by the
# same examples as the one before, because a gate that fails at random says nothing about the change; the nightly run
# draws new ones each time.
settings.register_profile(
    "hawkvision", deadline=None, max_examples=EXAMPLES, derandomize=DERANDOMIZE, suppress_health_check=IMPATIENT
)
settings.load_profile("hawkvision")

# NumPy's threads wait busily for one another, which on cores that others use too makes small products five times as
# expensive. It reads this when it is imported; the processes that tests start decide for themselves.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
importlib.import_module("numpy")
del os.environ["OPENBLAS_NUM_THREADS"]

# A shell lets background jobs ignore Ctrl-C, and their children inherit that; tests send Ctrl-C to their processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Nodes keep the state of streams in this folder; a test must not find the state of an earlier run.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hawkvision-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def together(nodeid: str) -> str:
    """The group of tests that runs in one worker: the folder if it is one of `TOGETHER`, else the file."""
    file = nodeid.partition("::")[0].removeprefix(f"{ROOT.name}/")
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


@pytest.fixture(autouse=True)
def nothing_given() -> Iterator[None]:
    """Leave nothing of commands that run in this process: the options that messages repeat, and how they log."""
    advice.forget()
    loggers = [logging.getLogger(), logging.getLogger("hawkvision")]
    levels, handlers = [each.level for each in loggers], [each.handlers[:] for each in loggers]
    yield
    for logger, level, found in zip(loggers, levels, handlers, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = found


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
    """Begin with the folders of `TOGETHER` and the files of `LONG` if several workers run the tests."""
    groups = (*TOGETHER, *LONG) if hasattr(config, "workerinput") else ()
    rank = {group: number for number, group in enumerate(groups)}
    items.sort(key=lambda item: (rank.get(together(item.nodeid), len(rank)), *shared(item)))


def shared(item: pytest.Item) -> tuple[int, bool]:
    """The place of a test by `SHARED`, and whether it must come after the others that use the same tier."""
    used: list[str] = getattr(item, "fixturenames", [])
    return sum(SHARED.get(name, 0) for name in used), item.get_closest_marker("ends_it") is not None
