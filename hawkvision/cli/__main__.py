"""`python -m hawkvision.cli`, which is what the command `hawkvision` runs."""

from __future__ import annotations

from hawkvision.cli import main

if __name__ == "__main__":
    main()
