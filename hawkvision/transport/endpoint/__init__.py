"""Both ends of a session: sender, receiver and channel without sockets; connection and server with them."""
