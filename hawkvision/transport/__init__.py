"""Images over bad links as datagrams that decode alone."""
