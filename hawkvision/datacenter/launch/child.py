"""The tier process: `python -m hawkvision.datacenter.launch.child FD FOLDER`, which only the launcher starts.

    launcher ──► keeper ──► tier process: enters a private network while it has a single thread, starts Ray, and deploys
                            the application

The keeper is this process before the fork. It does nothing but wait, so that it can always end the tier with the
launcher: the tier process may hang in a call of Ray that keeps Python's signal handlers from running, and some of Ray's
processes would outlive their parents by a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.datacenter.launch.isolation import enter_private_network, family
from hawkvision.system.child_server import adopt_orphans, stop_with_parent

SETTINGS_BYTES: Final = 256 * 1024
"""The longest message of settings, which have a few kB."""
LAUNCHER_DIED: Final = signal.SIGUSR1
"""The kernel's signal to the keeper at the launcher's death (prctl(2), PR_SET_PDEATHSIG)."""
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def main(number: int, folder: Path) -> int:
    """Run until a signal. The exit status is 0 after a clean stop, 1 after a printed error.

    Args:
        number: the descriptor of a socket to the launcher, which keeps message boundaries (SOCK_SEQPACKET). The first
            message to the tier process is its settings, as JSON: those that differ from their defaults.
        folder: private, for Ray's sockets and logs.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keeper = os.getpid()
    tier = os.fork()
    if tier != 0:
        os.close(number)  # its end tells the launcher that the tier process ends
        return _keep(tier)
    stop_with_parent(signal.SIGKILL, keeper)
    return _run_tier(number, folder)


def _keep(tier: int) -> int:
    """Wait for the tier process, and end what it leaves; the exit status is that of the tier process."""

    def pass_on(sent: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(tier, sent)

    adopt_orphans()
    signal.signal(LAUNCHER_DIED, _end_all)
    for each in _STOPS:
        signal.signal(each, pass_on)
    ended, status = os.waitpid(-1, 0)
    while ended != tier:
        ended, status = os.waitpid(-1, 0)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # the launcher reports the signal
        with contextlib.suppress(OSError):  # SIGKILL has no handler to be removed
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _end_all(*_: object) -> None:
    _kill_descendants()
    os._exit(1)


def _kill_descendants() -> None:
    """Kill all descendants, and those that they start meanwhile."""
    while len(left := family(os.getpid())) > 1:
        for pid in left[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _run_tier(number: int, folder: Path) -> int:
    stopping = threading.Event()
    for each in _STOPS:
        signal.signal(each, lambda *_: stopping.set())
    with socket.socket(fileno=number) as launcher:
        chosen = msgspec.json.decode(launcher.recv(SETTINGS_BYTES))
        if chosen.get("ray_network") != "shared":  # the launcher has resolved `auto`
            enter_private_network()
        # Imported here: NumPy starts threads, and a process with several threads cannot enter a user namespace.
        from hawkvision.core import logs
        from hawkvision.core.errors import HawkVisionError
        from hawkvision.core.settings.config import DatacenterConfig
        from hawkvision.core.settings.load import load_config
        from hawkvision.datacenter.launch.tier_process import serve

        try:
            config = load_config(DatacenterConfig, overrides=chosen, environ={})
            logs.configure(config.log_level, config.log_format)
            serve(config, folder, launcher, stopping)
        except HawkVisionError as error:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201  the command's output
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
