"""The edge node: the HTTP door, the worker pool and the escalation to the datacenter tier."""
