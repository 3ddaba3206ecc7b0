"""Emulated links: for UDP without privileges, and for all of IP between network namespaces."""
