"""The receiving end: images in, responses out."""
