"""What a design computes, without a device: its RTL, its netlist, and the same integers as compiled code."""
