"""Pictures and the models that look at them: decoding, resizing, and the backends that run a variant."""

import hawkvision.opencv  # noqa: F401
