"""The FPGA profile: a quantised edge model compiled to RTL (not built yet)."""
