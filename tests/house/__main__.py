"""`python -m tests.house`: the table of rooms, the measures of the source, and old words that are left."""

from __future__ import annotations

from tests.house import floors, metrics, vocabulary

if __name__ == "__main__":
    print(floors.table(), metrics.report(), vocabulary.report(), sep="\n\n")
