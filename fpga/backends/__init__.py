"""Backends of an edge node that give the integers of a quantised graph: on the CPU, in simulated RTL, on a device."""
