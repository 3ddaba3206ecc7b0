"""Quantised networks by kernels of our own, for processors with AVX-512 VNNI: `backend.Int8Backend`."""
