"""From an integer graph to a bitstream: folding, resources, RTL, synthesis, placement."""
