"""`hawkvision up`: both tiers, proved, shown and stopped together, as a user at a terminal has them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.system.conftest import COMMAND, Up, alive, descendants
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.ends_it
def test_what_it_shows_works_as_pasted_and_ctrl_c_leaves_nothing_behind(both: Up) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    assert both.address("edge node") != both.address("datacenter")
    place = next(number for number, line in enumerate(both.said) if line.startswith("$ curl "))
    ran = subprocess.run(["bash", "-c", both.said[place].removeprefix("$ ")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    shown, answered = json.loads(both.said[place + 1]), json.loads(ran.stdout)
    assert shown.keys() == answered.keys()
    assert (shown["label"], shown["accuracy"]["target"]) == (answered["label"], {"max_accuracy_drop": 0.02})
    assert not shown["degraded"]
    below = descendants(both.process.pid)
    assert len(below) > 2
    both.process.send_signal(signal.SIGINT)
    assert both.process.wait(60) == 0
    assert both.process.stdout is not None
    assert both.process.stdout.read() == "stopped\n"
    wait_until(lambda: not alive(below))
    said = both.log.read_text()
    assert re.search(r"^edge +\| ", said, re.MULTILINE)
    assert re.search(r"^datacenter +\| ", said, re.MULTILINE)


@pytest.mark.parametrize("option", ["--port", "--dc-port"])
def test_a_port_that_is_taken_is_an_error_before_anything_is_built_or_started(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--cache-dir", str(tmp_path), option, port]
        ran = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert f"error: {option}: cannot listen on 127.0.0.1:{port}: Address already in use" in ran.stderr
    assert (ran.stdout, list(tmp_path.iterdir())) == ("", [])


def test_both_tiers_on_one_port_are_an_error_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ["--cache-dir", str(tmp_path), "--port", port, "--dc-port", port]
    ran = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"error: --port: cannot listen on 127.0.0.1:{port}" in ran.stderr
