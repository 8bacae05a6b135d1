"""A conversation in a terminal: what is read, asked, calibrated and kept."""
