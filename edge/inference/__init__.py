"""The edge stage: loading, warming up, admission of images, and the workers that run it."""
