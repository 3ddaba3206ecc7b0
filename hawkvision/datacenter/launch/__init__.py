"""How a datacenter tier is started on one machine: sockets, a network of its own, a private directory, a supervisor."""
