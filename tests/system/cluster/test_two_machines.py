"""The commands of docs/operations/datacenter.md for a cluster of two machines, as they stand, on two machines.

The machines are namespaces of this one (`machines.py`), and `ray start` is told that each has two cores. Where the page
installs a new version, the machine gets a copy of this checkout that speaks another protocol. Requests go on meanwhile.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from hawkvision.models.sample_images import photographs
from hawkvision.system.child_server import running
from tests.fuzz.examples import ASKED
from tests.system import pages
from tests.system.cluster.machines import Machine, two_machines
from tests.system.pages import Block

PAGE = pages.ROOT / "docs" / "operations" / "datacenter.md"
BLOCKS = [block for block in pages.blocks(PAGE) if block.machine is not None]
CORES = 2
NEWER = "/tmp/newer"
"""Where a machine finds the new version, once it is installed: its /tmp is its own."""
INSTALL = f"""
mkdir {NEWER} && cp -r {pages.ROOT}/hawkvision {NEWER}/
for other in edge fpga loadgen models; do ln -s {pages.ROOT}/$other {NEWER}/; done
sed -i 's/^PROTOCOL: Final = .*/PROTOCOL: Final = 99/' {NEWER}/hawkvision/datacenter/deployment/messages.py
sed -i 's/^__version__: Final = .*/__version__: Final = "99.0"/' {NEWER}/hawkvision/core/__init__.py
"""
LOAD = """
import http.client, sys, time
key, image = sys.argv[1], open("cat.jpg", "rb").read()
while True:
    try:
        connection = http.client.HTTPConnection("10.0.0.1", 8090, timeout=60)
        connection.request("POST", "/v1/infer", image, {"Authorization": "Bearer " + key})
        status = str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        status = repr(error)
    with open("statuses", "a") as file:
        file.write(status + "\\n")
    time.sleep(0.2)
"""
TIMES = {"RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1", "RAY_raylet_start_wait_time_s": "120"}
"""An idle proxy of a drained machine ends after this instead of 30 s; Ray may start as slowly as a busy machine."""
SERVER = "hawkvision edge up"
LOADS_VARIABLES = ("set -a", "export ")


class Terminals:
    """A terminal on each machine: blocks run in the shared folder; variables that one has loaded hold for all after."""

    def __init__(self, machines: Mapping[str, Machine], folder: Path, servers: ExitStack) -> None:
        self._machines = machines
        self._folder = folder
        self._environment = pages.shell_environment(folder) | {"PYTHONPATH": f"{NEWER}:{pages.ROOT}", **TIMES}
        self._loading: list[str] = []
        self._servers = servers

    def run(self, block: Block) -> str:
        """Run a block; it fails if a command does. Gives what it prints."""
        assert block.machine is not None
        entering = self._machines[block.machine].entering()
        waiting, printed = list(self._loading), ""
        if not block.is_run:
            return self.shell(block.machine, INSTALL)
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

    def shell(self, machine: str, script: str) -> str:
        """Run commands that are not the page's."""
        ran = subprocess.run(
            [*self._machines[machine].entering(), "bash", "-ec", script], capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def load(self, machine: str, key: str) -> None:
        """Send the first machine requests, a few in a second, until it is switched off; `statuses` has the replies."""
        subprocess.Popen([*self._machines[machine].entering(), sys.executable, "-c", LOAD, key])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes machines of namespaces")
@pytest.mark.skipif(ASKED != "nightly", reason="the walk of two machines takes ten minutes: make test-thorough")
def test_a_cluster_of_two_machines_grows_is_updated_and_shrinks_as_the_page_says(cascade: None, tmp_path: Path) -> None:
    for program in ("curl", "ip", "nsenter"):
        assert shutil.which(program), f"{program} is not installed"
    shutil.copy(photographs()[0], tmp_path / "cat.jpg")
    assert {block.machine for block in BLOCKS} == {"first", "second"}
    # The machines are switched off first: a signal to what enters one of them does not reach what runs there.
    with ExitStack() as servers, two_machines(tmp_path) as machines:
        terminals = Terminals(machines, tmp_path, servers)
        for block in BLOCKS:
            if "dc remove" in block.text:
                statuses = Counter((tmp_path / "statuses").read_text().splitlines())
            terminals.run(block)
            if "edge up" in block.text:
                terminals.load("first", (tmp_path / "edge-1.key").read_text().strip())
    assert (tmp_path / "cluster.env").stat().st_mode & 0o077 == (tmp_path / "edge-1.key").stat().st_mode & 0o077 == 0
    # A caller that does not repeat a 503, which names a time to come back, may meet one while proxies change.
    assert statuses.keys() <= {"200", "503"}, statuses
    assert statuses["503"] <= statuses["200"] // 100, statuses
