"""The HTML page of one or more runs."""
