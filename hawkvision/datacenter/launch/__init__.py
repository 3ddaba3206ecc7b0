"""Starts a datacenter tier on one machine: public sockets, a private network and directory, a supervisor."""
