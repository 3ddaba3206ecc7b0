"""An edge node that may open few files: `python -m tests.edge.limited FILES [edge arguments]`."""

import resource
import sys

from edge.__main__ import main

if __name__ == "__main__":
    files = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sys.exit(main(sys.argv[2:]))
