"""Reading, converting and comparing the graphs that owners bring."""
