"""What the HTTP servers of both tiers share: connections and request bodies within bounds."""
