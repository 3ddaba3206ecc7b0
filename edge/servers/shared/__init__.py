"""What the servers share: fields of a request, HTTP messages, and the front end before the node."""
