"""What the HTTP servers of both tiers share: connections within bounds."""
