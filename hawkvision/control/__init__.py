"""The control plane of a fleet of nodes (not built yet)."""
