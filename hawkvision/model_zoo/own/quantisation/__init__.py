"""A user's float stage in fewer bits: int8, or integers for FPGAs."""
