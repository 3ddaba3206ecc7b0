"""What listens for callers: HTTP, datagrams and the Open Inference Protocol."""
