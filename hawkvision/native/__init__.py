"""Native code: C++ kernels for inference and ranking, compiled for the machine that runs them."""
