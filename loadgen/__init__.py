"""The load generator: a black-box tester of deployments (not built yet)."""
