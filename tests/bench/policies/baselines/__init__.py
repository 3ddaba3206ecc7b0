"""Other systems' policies, run in an edge node of ours to be compared with; see `tests/bench/policies/README.md`."""
