"""Circuits whose current somebody measured, written anew for `tests.bench.fpga_power_calibration`."""
