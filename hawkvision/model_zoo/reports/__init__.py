"""The page that a calibration writes."""
