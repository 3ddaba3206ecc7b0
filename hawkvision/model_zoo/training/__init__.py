"""Training the small networks that the project ships."""
