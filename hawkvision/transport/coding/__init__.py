"""Images as symbols that survive loss: JPEG segments, interleaving, forward error correction, concealment."""
