"""Circuits whose current was measured and published, written anew for `tests.bench.fpga.power_calibration`."""
