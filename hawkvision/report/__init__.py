"""HTML pages about measurements: each is one file that loads nothing, with tables and charts."""
