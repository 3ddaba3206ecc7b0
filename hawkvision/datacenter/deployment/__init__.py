"""Ray Serve: its settings, the deployments of the variants, and the calls to their replicas."""
