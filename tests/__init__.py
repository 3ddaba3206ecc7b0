"""Tests, and benches."""

import hawkvision.system.opencv_env  # noqa: F401  before OpenCV, which some of them import first
