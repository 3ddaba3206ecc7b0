"""`python -m tests.bench.servers`: see `tests.bench.servers.compare_servers`."""

from __future__ import annotations

import sys

from tests.bench.program import main
from tests.bench.servers import compare_servers

if __name__ == "__main__":
    sys.exit(main("tests.bench.servers", compare_servers))
