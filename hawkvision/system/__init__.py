"""The machine below: processes, memory, compilers and what libraries do to it."""
