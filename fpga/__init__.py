"""Compiles quantised networks to FPGAs, simulates and drives the devices, and shares images with the CPU."""
