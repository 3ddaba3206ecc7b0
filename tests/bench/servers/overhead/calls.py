"""How many calls of our own functions one photograph passes at an edge node, and in how many files.

    python -m tests.bench.servers.overhead.calls [EDGE OPTIONS]

The node runs in this process under `sys.setprofile`, on all threads. After a warm-up, photographs of 39 KB and 196 KB
are answered at the edge, five times each; the fewest calls count, because background tasks run now and then. A resumed
coroutine counts as a call.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[4]
OURS: Final = tuple(str(ROOT / package) + os.sep for package in ("hawkvision", "edge", "fpga"))
KILOBYTES: Final = (39, 196)
WARM_UP, REPEATS, SETTLE_S = 20, 5, 0.2


class Calls:
    """Counts calls of our functions, as the profile function of all threads."""

    counted: Counter[CodeType] | None = None
    """None: nothing is counted."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """See `sys.setprofile`."""
        if self.counted is not None and event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.counted[frame.f_code] += 1

    def during(self, ask: Callable[[], None]) -> Counter[CodeType]:
        """The calls of one request."""
        counted = self.counted = Counter()
        ask()
        time.sleep(SETTLE_S)  # the node writes its metrics after the answer
        self.counted = None
        return counted


def measure(port: int, calls: Calls) -> None:
    """Ask the node that is about to listen, print, and stop it."""
    from tests.images import photograph  # with OpenCV, which loads beside the node

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def status(method: str, path: str, body: bytes | None = None) -> int:
        try:
            connection.request(method, path, body)
            reply = connection.getresponse()
            reply.read()
        except OSError:
            connection.close()
            time.sleep(0.1)
            return 0
        return reply.status

    while status("GET", "/readyz") != 200:
        pass
    for kilobytes in KILOBYTES:
        body = photograph(kilobytes)

        def ask(body: bytes = body) -> None:
            assert status("POST", "/v1/classify?quality=fast", body) == 200

        for _ in range(WARM_UP):
            ask()
        counted = min((calls.during(ask) for _ in range(REPEATS)), key=Counter.total)
        files = Counter[str]()
        for code, number in counted.items():
            files[str(Path(code.co_filename).relative_to(ROOT))] += number
        print(f"{kilobytes} KB: {counted.total()} calls of {len(counted)} functions in {len(files)} files")
        for name, number in files.most_common():
            print(f"    {number:4d}  {name}")
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str]) -> int:
    """Run from the command line."""
    from edge.run import run

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    calls = Calls()
    threading.setprofile(calls)
    sys.setprofile(calls)
    threading.Thread(target=measure, args=(port, calls), daemon=True).start()
    return run(["--port", str(port), *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
