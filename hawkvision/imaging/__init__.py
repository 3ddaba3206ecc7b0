"""From the bytes of an image to the input of a network."""
