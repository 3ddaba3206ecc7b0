"""The servers of a node: HTTP, the Open Inference Protocol over HTTP, and datagrams, behind one front end."""
