"""One module per command of `python -m loadgen`, and what the commands share."""
