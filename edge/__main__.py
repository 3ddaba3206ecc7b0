"""Starts an edge node: `python -m edge`, which is what `hawkvision edge up` runs. See `edge/run.py`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit status is 0 after a clean stop, 1 for an error that was explained."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # until there is something to drain
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    # Imported once the signals are heard, for importing takes a second.
    from edge.run import run
    from hawkvision.system.terminal import quiet_without_reader

    with quiet_without_reader():
        return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
