"""Circuits whose current somebody measured, written anew for `tests.bench.fpga.power_calibration`."""
