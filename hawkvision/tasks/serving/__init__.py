"""How outputs and predictions of any kind are served: from a model's tensors to the wire between the tiers."""
