"""What models give for data sets, kept between runs, and what the stages of a cascade make of it."""
