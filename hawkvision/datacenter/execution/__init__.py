"""One replica: its models, its batches, and the evaluation of one image."""
