"""The datacenter tier on Ray Serve; the only package that imports Ray."""
