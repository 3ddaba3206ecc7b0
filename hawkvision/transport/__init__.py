"""Images over bad links as datagrams that decode alone."""

import hawkvision.system.opencv_env  # noqa: F401
