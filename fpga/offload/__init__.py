"""Shares images between an FPGA and the CPU: a plan made before the start, corrected while traffic changes.

After Cora (arXiv 2410.22229), which does this for network functions and SmartNICs. `cost_model` predicts both sides (on
top of `queueing`), `plan_search` finds the cheapest placement that keeps the deadlines, `controller` adjusts the share
at run time, and `runtime` is the backend.
"""
