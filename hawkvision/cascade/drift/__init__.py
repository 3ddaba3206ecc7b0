"""Whether traffic is still as certified: monitors and the controllers that follow them."""
