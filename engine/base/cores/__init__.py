"""The cores that this process may use, and how many threads run on them."""
