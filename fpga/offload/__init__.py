"""Offload planning: which rungs run on the FPGA and which on the CPU, and what keeps that right while traffic changes.

After Cora (arXiv 2410.22229), which does this for network functions and SmartNICs: `model` predicts what each side
gives (on top of `queues`), `search` finds the cheapest placement that keeps the deadlines, `control` decides while it
runs how many images go where, and `runtime` is the backend that does so.
"""
