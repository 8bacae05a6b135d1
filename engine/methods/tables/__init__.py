"""Tables of numbers for each layer and K/V head of one model, from files."""
