"""The datagram client: keeps a connection, decides how each image is encoded, and awaits its answer."""
