"""A cluster on this machine: its network, its nodes, and what runs on and beside them."""
