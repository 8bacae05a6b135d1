"""Methods that keep every token and read a part of them in each step."""
