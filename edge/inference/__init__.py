"""The node's own stages: loading, warming up, and the workers that run them."""
