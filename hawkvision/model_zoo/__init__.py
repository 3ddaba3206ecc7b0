"""Building, training, calibrating and certifying models."""
