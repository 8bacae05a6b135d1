"""A step over the rows that a method has kept: written, attended to and weighed by one call."""
