"""The edge node: the HTTP server, the worker pool and the escalation to the datacenter tier."""
