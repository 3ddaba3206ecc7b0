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

from hawkvision import advice

ROOT: Final = Path(__file__).parent
MACHINE: Final = ("system", "hawkvision/datacenter", "loadgen")
"""Folders whose tests start clusters, make network devices or look at all processes: one worker runs them all."""

# No test may depend on how busy the machine is; a hanging one is ended by pytest-timeout.
settings.register_profile("hawkvision", deadline=None)
settings.load_profile("hawkvision")

# A shell makes what it starts in the background deaf to Ctrl-C, which processes inherit; tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Nodes that tests start keep what they learn of streams, and must not find what others left.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="hawkvision-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_given() -> None:
    """Messages advise commands with the options of the process, which many tests share."""
    advice.forget()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, for they share fixtures, where several workers run them.

    Not by `--dist loadgroup`: it marks names of tests in a way that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist gives no types away
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix(f"{ROOT.name}/")
            return "machine" if file.startswith(MACHINE) else file

    return ByFile(config, log)
