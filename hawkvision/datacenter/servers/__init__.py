"""What listens for edge nodes: HTTP, datagrams and a local socket."""
