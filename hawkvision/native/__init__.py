"""Native code: C++ kernels for inference, compiled for the machine that runs them."""
