"""How sure a stage is: scores from logits, and temperatures that make its probabilities calibrated."""
