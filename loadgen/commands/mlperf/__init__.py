"""`python -m loadgen mlperf`: MLPerf LoadGen drives, and its queries become requests."""
