"""The sending end: images out, responses in."""
