"""Pictures over bad links as datagrams that decode alone."""

import hawkvision.opencv  # noqa: F401
