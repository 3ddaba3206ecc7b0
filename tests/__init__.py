"""Tests, and benches."""

import hawkvision.opencv  # noqa: F401  before OpenCV, which some of them import first
