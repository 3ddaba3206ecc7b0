"""What callers get: predictions of each kind, as JSON, as replies between the tiers, and as tensors."""
