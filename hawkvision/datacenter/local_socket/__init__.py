"""A short path between the server and replicas on the same machine, and the liveness of those replicas.

    server ◄── key, group ──────────────────────────────────────────────── replica, once its models are loaded
           ── 7: image, evaluations, deadline, whether to stream ──►
           ◄────────────────── 7: part ─── 7: part ─── 7: end, or error ──
           ── 7: cancel ──►
           ── 0: ping ──►   ◄── 0: pong ──

Serve starts, watches and replaces the replicas. If Serve also decides how many there are, images go through its
handles, which count them, and only the last line is used.

A replica that dies closes its connection. One that sends nothing for `SILENT_S` after a ping counts as absent until it
sends something; its requests go to another replica.

A frame is its length and the request's number, both unsigned 32-bit big-endian, and a pickled body. The server's
socket has a random name in Linux's abstract namespace (unix(7)), so no file is left behind. Any process can list those
names. So each end closes the connection unless the kernel says that the other end belongs to the same user
(SO_PEERCRED), and the server closes it unless the first bytes are its key, which only Serve's deployment record holds.

Serve does not count the requests on this path. If it stops a replica whose health check fails, the replica does not
finish them, and the server sends them to the next one.
"""
