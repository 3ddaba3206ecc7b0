"""Model files from weights: fetched, converted, quantised, verified."""
