"""The load generator: tests a deployment from outside, as its users would use it, and says what they would see."""
