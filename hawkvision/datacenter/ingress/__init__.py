"""The ingress: the deployment that takes requests, from Serve's proxies and at the public sockets of a launcher."""
