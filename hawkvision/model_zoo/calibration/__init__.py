"""Measuring stages on labelled images, and certifying what they show."""
