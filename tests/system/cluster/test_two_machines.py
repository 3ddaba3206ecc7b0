"""The commands of docs/operations/datacenter.md for a cluster of two machines, as they stand, on two machines.

The machines are namespaces of this one (`machines.py`), so what fits into one needs as many cores of the other as this
machine has: `ray start` is told that each has more.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from hawkvision.models.sample_images import photographs
from hawkvision.system.child_server import running
from tests.system import pages
from tests.system.cluster.machines import Machine, two_machines
from tests.system.pages import Block

PAGE = pages.ROOT / "docs" / "operations" / "datacenter.md"
BLOCKS = [block for block in pages.blocks(PAGE) if block.is_run and block.machine is not None]
CORES = 8
QUICKLY = {"RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1", "HAWKVISION_DC_NUM_CPUS": "1"}
"""An idle proxy of a drained machine ends after this instead of 30 s; all replicas fit on the machine that stays."""
SERVER = "hawkvision edge up"
LOADS_VARIABLES = ("set -a", "export ")


class Terminals:
    """A terminal on each machine: blocks run in the shared folder; variables that one has loaded hold for all after."""

    def __init__(self, machines: Mapping[str, Machine], folder: Path, servers: ExitStack) -> None:
        self._machines = machines
        self._folder = folder
        self._environment = pages.shell_environment(folder) | {"PYTHONPATH": str(pages.ROOT), **QUICKLY}
        self._loading: list[str] = []
        self._servers = servers

    def run(self, block: Block) -> str:
        """Run a block; it fails if a command does. Gives what it prints."""
        assert block.machine is not None
        entering = self._machines[block.machine].entering()
        waiting, printed = list(self._loading), ""
        for command in block.commands():
            if command.startswith(SERVER):
                script = "\n".join(self._loading) + f'\nexec {shlex.join(entering)} "$@"'
                prefix = ("bash", "-c", f"cd {self._folder}\n{script}", "terminal")
                self._servers.enter_context(
                    running("hawkvision.cli", *shlex.split(command)[1:], env=self._environment, prefix=prefix)
                )
                continue
            if command.startswith(LOADS_VARIABLES):
                self._loading.append(command)
            waiting.append(re.sub(r"\bray start\b", f"ray start --num-cpus={CORES}", command))
        return printed + pages.run_block(block, "\n".join(waiting), self._folder, self._environment, entering)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes machines of namespaces")
def test_a_cluster_of_two_machines_grows_is_updated_and_shrinks_as_the_page_says(cascade: None, tmp_path: Path) -> None:
    for program in ("curl", "ip", "nsenter"):
        assert shutil.which(program), f"{program} is not installed"
    shutil.copy(photographs()[0], tmp_path / "cat.jpg")
    assert {block.machine for block in BLOCKS} == {"first", "second"}
    # The machines are switched off first: a signal to what enters one of them does not reach what runs there.
    with ExitStack() as servers, two_machines(tmp_path) as machines:
        terminals = Terminals(machines, tmp_path, servers)
        for block in BLOCKS:
            terminals.run(block)
