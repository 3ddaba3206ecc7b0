"""Native code: C++ kernels for inference, bicubic scaling and ranking, compiled for the machine that runs them."""
