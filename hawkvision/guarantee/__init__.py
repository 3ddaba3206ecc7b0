"""The accuracy guarantee: evidence, the tests of a threshold, and certificates."""
