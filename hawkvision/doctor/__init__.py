"""Whether a machine is fit to run what its settings say, before somebody depends on it: `hawkvision doctor`."""
