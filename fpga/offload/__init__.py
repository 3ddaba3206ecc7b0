"""Shares images between an FPGA and the CPU: a plan made before the start, corrected while traffic changes.

After Cora (arXiv 2410.22229), which does this for network functions and SmartNICs. `model` predicts both sides (on top
of `queueing`) and chooses the cheapest share that keeps the deadline, `controller` adjusts the share at run time, and
`runtime` is the backend.
"""
