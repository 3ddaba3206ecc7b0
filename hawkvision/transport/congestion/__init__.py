"""How fast datagrams may leave: what reports tell of a path, and the congestion controllers that act on it."""
