"""Methods that give tokens up for good."""
