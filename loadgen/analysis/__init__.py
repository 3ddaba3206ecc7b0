"""Statistics of recorded runs: quantiles, confidence intervals, accuracy, steady state, capacity."""
