"""The tier process: `python -m hawkvision.datacenter.launch.child FD`, which only the launcher starts.

It enters a private network while it has a single thread, starts Ray and deploys the application.
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

from hawkvision.datacenter.launch.messages import SETTINGS_BYTES, TierSettings
from hawkvision.datacenter.launch.open_ports import family
from hawkvision.datacenter.launch.private_network import enter_private_network

LAUNCHER_DIED: Final = signal.SIGUSR1
"""The kernel's signal at the launcher's death (prctl(2), PR_SET_PDEATHSIG)."""


def main(number: int) -> int:
    """Run until a signal. The exit status is 0 after a clean stop, 1 after a printed error."""
    stopping = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stopping.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(LAUNCHER_DIED, _end_all)
    with socket.socket(fileno=number) as launcher:
        received = msgspec.json.decode(launcher.recv(SETTINGS_BYTES), type=TierSettings)
        if received.private_network:
            enter_private_network()
        # Imported here: NumPy starts threads, and a process with several threads cannot enter a user namespace.
        from hawkvision.core import logs
        from hawkvision.core.errors import HawkVisionError
        from hawkvision.core.settings.config import DatacenterConfig
        from hawkvision.core.settings.load import load_config
        from hawkvision.datacenter.launch.tier_process import Launch, serve

        try:
            config = load_config(DatacenterConfig, overrides=received.config, environ={})
            logs.configure(config.log_level, config.log_format)
            serve(Launch(config, Path(received.folder), Path(received.launcher), launcher), stopping)
        except HawkVisionError as error:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201  the command's output
            return 1
    return 0


def _end_all(*_: object) -> None:
    """Kill all descendants and exit at once; some of Ray's would linger for a minute."""
    for pid in family(os.getpid())[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
