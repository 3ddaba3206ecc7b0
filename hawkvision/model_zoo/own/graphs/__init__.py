"""Graphs that owners bring: read, completed by what their owners say, converted and compared."""
