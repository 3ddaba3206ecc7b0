"""Asking the datacenter: transports, which of them is used, and what is believed of replies."""
