"""`python -m tests.bench.policies`: see `tests.bench.policies.compare_policies`."""

from __future__ import annotations

import sys

from tests.bench.policies import compare_policies
from tests.bench.program import main

if __name__ == "__main__":
    sys.exit(main("tests.bench.policies", compare_policies))
