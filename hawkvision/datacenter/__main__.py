"""Starts a datacenter tier on this machine: `python -m hawkvision.datacenter`, which `hawkvision dc up` runs.

With `--with-parent` it stops when its parent process dies in any way (Linux).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

WITH_PARENT: Final = "--with-parent"
DESCRIPTION: Final = "Start a datacenter tier on this machine, Ray included."


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. The exit status is 0 after a clean stop, 1 after a printed error."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are files to read again
    # Imported after the signal handlers are set, because the imports take a second.
    from hawkvision.core import logs
    from hawkvision.core.errors import HawkVisionError
    from hawkvision.core.settings.config import DatacenterConfig
    from hawkvision.core.settings.load import read_command_line
    from hawkvision.datacenter.launch.supervisor import launch
    from hawkvision.system.child_server import stop_with_parent
    from hawkvision.system.library_environment import warn_if_allowed
    from hawkvision.system.terminal import quiet_without_reader

    words = list(sys.argv[1:] if argv is None else argv)
    if WITH_PARENT in words:
        words.remove(WITH_PARENT)
        stop_with_parent()
    logs.configure()  # until the settings are read
    try:
        with quiet_without_reader():
            config = read_command_line(DatacenterConfig, words, "hawkvision dc up", DESCRIPTION)
            logs.configure(config.log_level, config.log_format)
            warn_if_allowed()
            return launch(config, stopping)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  the command's output
        return 1


if __name__ == "__main__":
    sys.exit(main())
