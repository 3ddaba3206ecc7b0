"""What listens for edge nodes: HTTP and datagrams."""
