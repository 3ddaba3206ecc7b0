"""`hawkvision review`: people label a folder of images on their own machine, and certificates come of it."""
