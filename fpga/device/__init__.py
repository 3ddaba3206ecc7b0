"""The line between a host and a device: frames, protocol, links, and an emulated device."""
