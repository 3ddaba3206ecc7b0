"""`hawkvision doctor`: checks whether this machine can run the configured tier."""
