"""What a load test sends: arrival times, target classes, images; and the record of a run."""
